// The parts of DLPack 1.3's C exchange interface that this module uses. With this interface, a
// library describes its arrays to C without calls to Python:
// https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace unisono::bind::dlpack {

constexpr uint32_t kMajor = 1;
constexpr const char* kAttribute =
    "__dlpack_c_exchange_api__";  // attribute of the array class: a capsule
constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr int32_t kCpu = 1;  // DLPack's number of the device type CPU

// Code and bits of an element type, in the order of `DType`. DLPack has no pairs.
struct Element {
    uint8_t code, bits;
};
constexpr Element kElements[] = {
    {2, 32}, {2, 64}, {2, 16}, {4, 16}, {0, 8},  {1, 8},   {0, 16}, {1, 16}, {0, 32},
    {1, 32}, {0, 64}, {1, 64}, {6, 8},  {5, 64}, {5, 128}, {10, 8}, {12, 8},
};

struct Tensor {
    void* data;
    int32_t device_type, device_number;
    int32_t dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;  // strides in elements, not in bytes
    uint64_t byte_offset;
};

struct ExchangeApi {
    uint32_t major, minor;
    ExchangeApi* previous;
    void* allocate;
    void* from_object;
    void* to_object;
    // Describes an array. The description is valid while the array is unchanged. Returns -1 with a
    // Python error set.
    int (*describe)(void* object, Tensor* out);
    void* stream;
};

}  // namespace unisono::bind::dlpack
