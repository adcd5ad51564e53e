#include "mpi/open_mpi_operators.h"

#include <array>

#include "capi/unisono.h"

namespace unisono::mpi {
namespace {

// Pairs of 16-bit patterns whose results differ between all reductions of 16-bit floats. 0x7c01 is
// not a number in float16 and is large in bfloat16; MLX's maximum then returns the first argument.
// The last pair is negative: integers with these patterns have the other order.
struct Pair {
    uint16_t in, both;
};
constexpr std::array<Pair, 5> kPairs{
    {{0x3c00, 0x3c00}, {0x4000, 0x3c00}, {0x7c01, 0x3c00}, {0x3c00, 0x7c01}, {0xbc00, 0xc000}}};
constexpr uint16_t kAny = 0xffff;  // a sum with what is not a number, or a rounded one

struct Known {
    Reduction reduction;
    std::array<uint16_t, kPairs.size()> results;
};
constexpr std::array<Known, 6> kKnown{{
    {{UNISONO_FLOAT16, UNISONO_SUM}, {0x4000, 0x4200, kAny, kAny, 0xc200}},
    {{UNISONO_BFLOAT16, UNISONO_SUM}, {0x3c80, 0x4000, kAny, kAny, kAny}},
    {{UNISONO_FLOAT16, UNISONO_MAX}, {0x3c00, 0x4000, 0x3c00, 0x7c01, 0xbc00}},
    {{UNISONO_BFLOAT16, UNISONO_MAX}, {0x3c00, 0x4000, 0x7c01, 0x7c01, 0xbc00}},
    {{UNISONO_FLOAT16, UNISONO_MIN}, {0x3c00, 0x3c00, 0x3c00, 0x7c01, 0xc000}},
    {{UNISONO_BFLOAT16, UNISONO_MIN}, {0x3c00, 0x3c00, 0x3c00, 0x3c00, 0xc000}},
}};

// Room for one element of any type. Functions of 16-bit types change the first two bytes only.
using Element = std::array<uint16_t, 8>;

std::optional<uint16_t> combined(UserFunction function, Pair pair, uint16_t rest) {
    Element in, both;
    in.fill(rest);
    both.fill(static_cast<uint16_t>(0x3333 - rest));
    in[0] = pair.in;
    both[0] = pair.both;
    const Element before = both;
    int one = 1;
    function(in.data(), both.data(), &one, nullptr);
    for (size_t place = 1; place < both.size(); ++place)
        if (both[place] != before[place]) return std::nullopt;
    return both[0];
}

bool does(UserFunction function, const Known& known) {
    for (size_t which = 0; which < kPairs.size(); ++which) {
        for (const uint16_t rest : {uint16_t{0x1111}, uint16_t{0x2222}}) {
            const auto result = combined(function, kPairs[which], rest);
            if (!result || (known.results[which] != kAny && *result != known.results[which]))
                return false;
        }
    }
    return true;
}

}  // namespace

std::optional<Reduction> recognised(UserFunction function) {
    for (const Known& known : kKnown)
        if (does(function, known)) return known.reduction;
    return std::nullopt;
}

}  // namespace unisono::mpi
