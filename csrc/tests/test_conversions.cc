// Tests the widening, narrowing and scaling of elements by every instruction set that this CPU has.
// The results must equal those of the oracle bit for bit.
#include <string>
#include <type_traits>
#include <vector>

#include "tests/elements.h"

namespace {

using namespace unisono;
using namespace unisono::test;

std::vector<float> hard_floats(size_t count) {
    Generator generator;
    const auto bytes = generator.elements(DType::float32, count);
    std::vector<float> values(count);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
}

// Returns values for which rounding is difficult: representable numbers, the halves between
// neighbours, and the float32 values next to those halves.
template <class Narrow>
std::vector<float> with_ties() {
    std::vector<float> values = hard_floats(40000);
    constexpr int stride = Narrow::width == 8 ? 1 : 7;
    for (int m = 0; m < Narrow::largest; m += stride) {
        using Bits = typename Narrow::Bits;
        const float a = Narrow{static_cast<Bits>(m)}.widened();
        const float b = Narrow{static_cast<Bits>(m + 1)}.widened();
        const float half = std::isinf(b) ? a * 1.25F : a + (b - a) / 2;
        for (float tie : {a, half, std::nextafter(half, 0.0F), std::nextafter(half, INFINITY)}) {
            values.push_back(tie);
            values.push_back(-tie);
        }
    }
    return values;
}

// Returns the expected bits of a widened NaN; see kernels.h.
template <class Narrow>
uint32_t widened_bits(Narrow element) {
    uint32_t bits;
    const float value = element.widened();
    std::memcpy(&bits, &value, sizeof bits);
    if (!element.is_nan()) return bits;
    const uint32_t sign = element.is_negative() ? 0x80000000u : 0u;
    if (Narrow::width == 8) return sign | 0x7FC00000u;
    constexpr int fraction = std::is_same_v<Narrow, oracle::Bfloat16> ? 7 : 10;
    const auto payload = static_cast<uint32_t>(element.magnitude()) & ((1u << fraction) - 1);
    const uint32_t quiet = fraction == 10 ? 0x400000u : 0u;
    return sign | 0x7F800000u | quiet | payload << (23 - fraction);
}

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class Narrow>
void check_conversions(Report& report, const Table& table, DType type) {
    using Bits = typename Narrow::Bits;
    constexpr size_t all = size_t{1} << Narrow::width;
    const std::string where =
        std::string(table.name) + " dtype " + std::to_string(static_cast<int>(type));
    std::vector<Bits> every(all), scaled(all);
    for (size_t i = 0; i < all; ++i) every[i] = static_cast<Bits>(i);
    std::vector<float> wide(all);
    for (const float factor : {1.0F, -0.3F, 1e30F, 3e-20F, INFINITY}) {
        const bool plain = factor == 1.0F;
        widen_with(table, type, wide.data(), every.data(), all, plain ? nullptr : &factor);
        scale_with(table, type, scaled.data(), every.data(), all, &factor);
        bool widens = true, scales = true;
        for (size_t i = 0; i < all; ++i) {
            const float product = as_float(widened_bits(Narrow{every[i]})) * factor;
            const float expected =
                plain ? as_float(widened_bits(Narrow{every[i]})) : oracle::with_one_nan(product);
            widens = widens && std::memcmp(&wide[i], &expected, sizeof expected) == 0;
            scales = scales && scaled[i] == Narrow::rounded(product).bits;
        }
        report.check(widens, where + " widen times " + std::to_string(factor));
        report.check(scales, where + " scale by " + std::to_string(factor));
    }
    const std::vector<float> values = with_ties<Narrow>();
    std::vector<Bits> rounded(values.size());
    narrow_with(table, type, rounded.data(), values.data(), values.size());
    bool narrows = true;
    for (size_t i = 0; i < values.size(); ++i)
        narrows = narrows && rounded[i] == Narrow::rounded(values[i]).bits;
    report.check(narrows, where + " narrow");
    for (size_t count = 0; count < 70;
         ++count) {  // tests partial vectors, and that nothing is written after the end
        std::vector<float> few(count + 1, 5.0F);
        std::vector<Bits> back(count + 1, Bits{42});
        widen_with(table, type, few.data(), every.data(), count, nullptr);
        narrow_with(table, type, back.data(), few.data(), count);
        bool same = few[count] == 5.0F && back[count] == 42;
        for (size_t i = 0; i < count; ++i) same = same && back[i] == every[i];
        report.check(same, where + " count " + std::to_string(count));
    }
}

// A scaled element equals the product with one factor per element.
void check_scales(Report& report, const Table& table) {
    Generator generator;
    for (size_t t = 0; t < num_dtypes; ++t) {
        const auto type = static_cast<DType>(t);
        if (!supports(type, ReduceOp::premul_sum)) {
            report.check(table.find_scale(type) == nullptr,
                         "a scale kernel of an unsupported type");
            continue;
        }
        if (is_narrow_float(type)) continue;
        for (size_t count : {0, 1, 5, 63, 64, 65, 1000}) {
            const auto x = generator.elements(type, count), factor = generator.elements(type, 1);
            std::vector<uint8_t> factors, expected(x.size()), found(x.size());
            for (size_t i = 0; i < count; ++i)
                factors.insert(factors.end(), factor.begin(), factor.end());
            const void* srcs[] = {x.data(), factors.data()};
            oracle::reduce(type, ReduceOp::prod, expected.data(), srcs, 2, count, 0);
            const Case c{type, ReduceOp::prod, 2, count, 0};
            scale_with(table, type, found.data(), x.data(), count, factor.data());
            report.check(equal(c, found.data(), expected.data()), describe(table, c, "scale"));
            found = x;
            scale_with(table, type, found.data(), found.data(), count, factor.data());
            report.check(equal(c, found.data(), expected.data()), describe(table, c, "in place"));
        }
    }
}

void check_conversions(Report& report, const std::vector<const Table*>& tables) {
    for (const Table* table : tables) {
        check_conversions<oracle::Float16>(report, *table, DType::float16);
        check_conversions<oracle::Bfloat16>(report, *table, DType::bfloat16);
        check_conversions<oracle::Float8E4m3fn>(report, *table, DType::float8_e4m3fn);
        check_conversions<oracle::Float8E5m2>(report, *table, DType::float8_e5m2);
        check_scales(report, *table);
    }
}

}  // namespace

int main() {
    Report report;
    check_conversions(report, all_tables());
    return report.finish();
}
