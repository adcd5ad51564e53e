// Bindings of the conversions and scalings of elements. All of them release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <string>

#include "bind/buffer.h"
#include "bind/gil.h"
#include "bind/register.h"
#include "core/error.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

DType narrow_type(uint32_t dtype) {
    if (dtype >= num_dtypes || !is_narrow_float(static_cast<DType>(dtype)))
        throw Error(Fault::invalid, "expected the number of a 16- or 8-bit float type, got " +
                                        std::to_string(dtype));
    return static_cast<DType>(dtype);
}

void scale(uint32_t dtype, Address dst, Address src, uint64_t count, const nb::bytes& factor) {
    const auto type = static_cast<DType>(dtype);
    if (dtype >= num_dtypes || !supports(type, ReduceOp::premul_sum))
        throw Error(Fault::invalid, "expected the number of a type that premul_sum takes, got " +
                                        std::to_string(dtype));
    const size_t expected = is_narrow_float(type) ? sizeof(float) : size_of(type);
    if (factor.size() != expected) {
        throw Error(Fault::invalid, "expected a factor of " + std::to_string(expected) +
                                        " bytes, got " + std::to_string(factor.size()));
    }
    const char* value = factor.c_str();
    const WithoutGil release;
    kernels::scale(type, at(dst), at(src), count, value);
}

}  // namespace

void register_narrow_floats(nb::module_& m) {
    m.def(
        "widen",
        [](uint32_t dtype, Address dst, Address src, uint64_t count, std::optional<float> factor) {
            const DType type = narrow_type(dtype);
            const WithoutGil release;
            kernels::widen(type, reinterpret_cast<float*>(dst), at(src), count,
                           factor ? &*factor : nullptr);
        },
        "dtype"_a, "dst"_a, "src"_a, "count"_a, "factor"_a = nb::none());
    m.def(
        "narrow",
        [](uint32_t dtype, Address dst, Address src, uint64_t count) {
            const DType type = narrow_type(dtype);
            const WithoutGil release;
            kernels::narrow(type, at(dst), reinterpret_cast<const float*>(src), count);
        },
        "dtype"_a, "dst"_a, "src"_a, "count"_a);
    m.def("scale", &scale, "dtype"_a, "dst"_a, "src"_a, "count"_a, "factor"_a);
}

}  // namespace unisono::bind
