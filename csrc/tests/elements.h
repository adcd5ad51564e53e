// Difficult elements for tests of kernels, and descriptions of test cases.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "tests/oracle.h"
#include "tests/report.h"

namespace unisono::test {

using namespace unisono::kernels;

// Memory of exactly `bytes` bytes at `offset` past a cache line, so that sanitizers detect
// overruns.
class Buffer {
  public:
    Buffer(size_t bytes, size_t offset)
        : offset_(offset), storage_(static_cast<uint8_t*>(::operator new(bytes + offset, align))) {}
    uint8_t* data() { return storage_.get() + offset_; }

  private:
    static constexpr std::align_val_t align{64};
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete(p, align); }
    };
    size_t offset_;
    std::unique_ptr<uint8_t, Free> storage_;
};

template <class T>
void put(std::vector<uint8_t>& out, size_t at, T value) {
    std::memcpy(out.data() + at, &value, sizeof value);
}

// Generates random elements, some of them difficult.
class Generator {
  public:
    std::vector<uint8_t> elements(DType type, size_t count) {
        std::vector<uint8_t> out(count * size_of(type));
        switch (type) {
            case DType::float32:
            case DType::complex64:
                fill<uint32_t>(out, [&] { return float32(); });
                break;
            case DType::float64:
            case DType::complex128:
                fill<uint64_t>(out, [&] { return float64(); });
                break;
            case DType::float16:
                fill<uint16_t>(out, [&] { return narrow<oracle::Float16, 10>(); });
                break;
            case DType::bfloat16:
                fill<uint16_t>(out, [&] { return narrow<oracle::Bfloat16, 7>(); });
                break;
            case DType::float8_e4m3fn:
            case DType::float8_e5m2:
                // Random bit patterns. There are only 256, so all of them occur.
                fill<uint8_t>(out, [&] { return random_(); });
                break;
            case DType::float32_int32:
                fill<uint64_t>(out, [&] { return few(float32(), 8) | (random_() % 4 - 2) << 32; });
                break;
            case DType::float64_int64:
                fill_pairs(out, [&] { return few(float64(), 8); });
                break;
            case DType::int32_int32:
                fill<uint64_t>(out, [&] { return random_() & 0x80000003'C0000001; });
                break;
            case DType::int64_int64:
                fill_pairs(out, [&] { return random_() & 0x8000000000000001; });
                break;
            case DType::boolean:
                fill<uint8_t>(out, [&] { return random_() % 2 != 0 ? uint8_t{0} : random_(); });
                break;
            default:
                fill<uint8_t>(out, [&] { return integer_byte(); });
        }
        return out;
    }

  private:
    template <class T, class F>
    void fill(std::vector<uint8_t>& out, F next) {
        for (size_t at = 0; at < out.size(); at += sizeof(T)) put(out, at, static_cast<T>(next()));
    }

    // Fills pairs with few different values and indices, so that many pairs tie.
    template <class F>
    void fill_pairs(std::vector<uint8_t>& out, F value) {
        bool index = false;
        fill<uint64_t>(out, [&] {
            index = !index;
            return index ? value() : random_() % 4 - 2;
        });
    }

    // Returns either `value` or one of about `count` earlier values.
    template <class T>
    T few(T value, size_t count) {
        std::vector<uint64_t>& seen = seen_[sizeof(T) / 8];
        if (seen.size() < count) seen.push_back(value);
        return random_() % 2 != 0 ? value : static_cast<T>(seen[random_() % seen.size()]);
    }

    uint64_t integer_byte() {
        static constexpr uint8_t extremes[] = {0x00, 0xFF, 0x7F, 0x80, 0x01};
        return random_() % 3 != 0 ? random_() : extremes[random_() % 5];
    }

    uint32_t float32() {
        static constexpr uint32_t special[] = {
            0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF,
            0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0x3F800000, 0xBF800000};
        if (random_() % 4 == 0) return special[random_() % std::size(special)];
        if (random_() % 4 == 0) return static_cast<uint32_t>(random_());
        const auto integer = static_cast<int64_t>(random_() >> 40) - (1 << 23);
        const float value = static_cast<float>(integer) / 4096;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }

    uint64_t float64() {
        static constexpr uint64_t special[] = {0,
                                               0x8000000000000000,
                                               1,
                                               0x000FFFFFFFFFFFFF,
                                               0x0010000000000000,
                                               0x7FEFFFFFFFFFFFFF,
                                               0x7FF0000000000000,
                                               0xFFF0000000000000,
                                               0x7FF8000000000000,
                                               0x7FF0000000000001,
                                               0x3FF0000000000000};
        if (random_() % 4 == 0) return special[random_() % std::size(special)];
        if (random_() % 4 == 0) return random_();
        const double value = static_cast<double>(static_cast<int64_t>(random_())) / 1e15;
        uint64_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }

    // Returns a random narrow float. Half of the values are within a few exponents of 1, where sums
    // of short fractions tie.
    template <class Narrow, int fraction>
    uint16_t narrow() {
        constexpr uint16_t infinity = Narrow::largest;
        const uint16_t special[] = {0x0000,
                                    0x8000,
                                    0x0001,
                                    0x8001,
                                    (1 << fraction) - 1,
                                    1 << fraction,
                                    infinity - 1,
                                    infinity,
                                    static_cast<uint16_t>(infinity | 0x8000),
                                    infinity + 1,
                                    static_cast<uint16_t>(infinity | 0x8000 | 1 << (fraction - 1)),
                                    0x7FFF};
        if (random_() % 8 == 0) return special[random_() % std::size(special)];
        if (random_() % 2 == 0) return static_cast<uint16_t>(random_());
        const auto near_one = static_cast<uint16_t>(Narrow::bias - 3 + random_() % 8);
        return static_cast<uint16_t>(near_one << fraction | random_() % (1 << fraction) |
                                     (random_() % 2 << 15));
    }

    std::mt19937_64 random_{12345};
    std::vector<uint64_t> seen_[2];
};

struct Case {
    DType type;
    ReduceOp op;
    size_t nsrc, count;
    uint32_t divisor;
};

inline std::string describe(const Table& table, const Case& c, const std::string& what) {
    return std::string(table.name) + " dtype " + std::to_string(static_cast<int>(c.type)) + " op " +
           std::to_string(static_cast<int>(c.op)) + " nsrc " + std::to_string(c.nsrc) + " count " +
           std::to_string(c.count) + " divisor " + std::to_string(c.divisor) + " " + what;
}

inline bool equal(const Case& c, const void* a, const void* b) {
    const size_t bytes = c.count * size_of(c.type);
    return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

// Returns the kernel tables of all instruction sets that this CPU has.
inline std::vector<const Table*> all_tables() {
    const Table* found[max_tables];
    return {found, found + runnable_tables(found)};
}

}  // namespace unisono::test
