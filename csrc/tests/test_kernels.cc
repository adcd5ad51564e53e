// Every kernel of every instruction set this CPU has against the oracle, bit for bit.
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../kernels/table.h"
#include "oracle.h"
#include "report.h"

namespace {

using namespace unisono;
using namespace unisono::kernels;
using unisono::test::Report;

// Memory of exactly `bytes` at `offset` past a cache line, so that sanitizers see overruns.
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

// Elements that make kernels go wrong among ordinary ones.
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
                fill<uint8_t>(out, [&] { return random_(); });  // few enough to meet all
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

    // Pairs with few values and indices, so that many tie.
    template <class F>
    void fill_pairs(std::vector<uint8_t>& out, F value) {
        bool index = false;
        fill<uint64_t>(out, [&] {
            index = !index;
            return index ? value() : random_() % 4 - 2;
        });
    }

    // One of `count` values or so: the first ones that were given, or this one.
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

    // Half of the values are within a few exponents of 1, where sums of short fractions tie.
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

// How the operands of a case lie in memory and are written.
struct Layout {
    const char* name;
    size_t offset;  // of each operand, in bytes, times its position; in elements if `elements`
    bool elements;
    int alias;  // the source dst is (-1: the last), or none
    bool has_dst2;
    Store store, store2;
};
constexpr int no_alias = -2;
constexpr Layout layouts[] = {
    {"aligned", 0, false, no_alias, false, Store::cached, Store::cached},
    {"elements", 3, true, no_alias, false, Store::cached, Store::cached},
    {"bytes", 1, false, no_alias, false, Store::cached, Store::cached},
    {"in place first", 5, true, 0, false, Store::cached, Store::cached},
    {"in place last", 1, false, -1, false, Store::cached, Store::cached},
    {"dst2", 7, true, no_alias, true, Store::cached, Store::cached},
    {"dst2 in place", 0, false, 0, true, Store::cached, Store::streaming},
    {"dst streaming", 5, true, -1, false, Store::streaming, Store::cached},
    {"dst streaming dst2", 3, false, 0, true, Store::streaming, Store::cached},
    {"both streaming", 1, true, no_alias, true, Store::streaming, Store::streaming},
};

std::string describe(const Table& table, const Case& c, const std::string& what) {
    return std::string(table.name) + " dtype " + std::to_string(static_cast<int>(c.type)) + " op " +
           std::to_string(static_cast<int>(c.op)) + " nsrc " + std::to_string(c.nsrc) + " count " +
           std::to_string(c.count) + " divisor " + std::to_string(c.divisor) + " " + what;
}

bool equal(const Case& c, const void* a, const void* b) {
    const size_t bytes = c.count * size_of(c.type);
    return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

void check_layout(Report& report, const Table& table, const Case& c, const Layout& layout,
                  const std::vector<std::vector<uint8_t>>& inputs,
                  const std::vector<uint8_t>& expected) {
    const size_t bytes = c.count * size_of(c.type);
    const size_t unit = layout.offset * (layout.elements ? size_of(c.type) : 1);
    std::vector<Buffer> operands;
    std::vector<const void*> srcs;
    for (size_t s = 0; s < c.nsrc; ++s) {
        operands.emplace_back(bytes, unit * (s + 1) % 64);
        if (bytes != 0) std::memcpy(operands.back().data(), inputs[s].data(), bytes);
        srcs.push_back(operands.back().data());
    }
    Buffer own(bytes, unit % 64), second(bytes, unit * 2 % 64);
    const bool aliased = layout.alias != no_alias;
    const size_t alias = layout.alias < 0 ? c.nsrc - 1 : static_cast<size_t>(layout.alias);
    uint8_t* dst = aliased ? operands[alias].data() : own.data();
    reduce_with(table, c.type, c.op, dst, layout.has_dst2 ? second.data() : nullptr, srcs.data(),
                c.nsrc, c.count, c.divisor, layout.store, layout.store2);
    report.check(equal(c, dst, expected.data()), describe(table, c, layout.name));
    if (layout.has_dst2) {
        const bool same = bytes == 0 || std::memcmp(dst, second.data(), bytes) == 0;
        report.check(same, describe(table, c, std::string(layout.name) + " dst2"));
    }
    for (size_t s = 0; s < c.nsrc; ++s) {
        if ((aliased && s == alias) || bytes == 0) continue;
        report.check(std::memcmp(operands[s].data(), inputs[s].data(), bytes) == 0,
                     describe(table, c, std::string(layout.name) + " changed a source"));
    }
}

void check_case(Report& report, const std::vector<const Table*>& tables, Generator& generator,
                const Case& c) {
    std::vector<std::vector<uint8_t>> inputs;
    std::vector<const void*> srcs;
    for (size_t s = 0; s < c.nsrc; ++s) inputs.push_back(generator.elements(c.type, c.count));
    for (const auto& input : inputs) srcs.push_back(input.data());
    std::vector<uint8_t> expected(c.count * size_of(c.type));
    oracle::reduce(c.type, c.op, expected.data(), srcs.data(), c.nsrc, c.count, c.divisor);
    for (const Table* table : tables) {
        for (const Layout& layout : layouts)
            check_layout(report, *table, c, layout, inputs, expected);
    }
}

void check_reductions(Report& report, const std::vector<const Table*>& tables) {
    Generator generator;
    for (size_t t = 0; t < num_dtypes; ++t) {
        for (size_t o = 0; o < num_reduce_ops; ++o) {
            const auto type = static_cast<DType>(t);
            const auto op = static_cast<ReduceOp>(o);
            if (!supports(type, op)) {
                for (const Table* table : tables)
                    report.check(table->find(type, op) == nullptr, "extra");
                continue;
            }
            for (size_t nsrc : {1, 2, 3, 4, 5, 8}) {
                for (size_t count : {0, 1, 7, 63, 64, 65, 1000, 5000}) {
                    const Case c{type, op, nsrc, count, op == ReduceOp::avg ? uint32_t(nsrc) : 0};
                    check_case(report, tables, generator, c);
                }
            }
        }
        if (!supports(static_cast<DType>(t), ReduceOp::avg)) continue;
        for (uint32_t divisor : {1u, 3u, 1000u, 4000000000u}) {
            check_case(report, tables, generator,
                       {static_cast<DType>(t), ReduceOp::sum, 2, 999, divisor});
        }
    }
}

// Every 16-bit float through widening and rounding; every pair with one of 64 partners, multiplied.
void check_narrow_exhaustively(Report& report, const std::vector<const Table*>& tables) {
    constexpr size_t all = 1 << 16;
    for (DType type : {DType::float16, DType::bfloat16}) {
        std::vector<uint16_t> every(all), partner(all), expected(all), result(all);
        for (size_t i = 0; i < all; ++i) every[i] = static_cast<uint16_t>(i);
        for (size_t round = 0; round < 64; ++round) {
            std::mt19937_64 random(round);
            for (uint16_t& value : partner) value = static_cast<uint16_t>(random());
            const void* srcs[] = {every.data(), partner.data()};
            const Case c{type, ReduceOp::prod, 2, all, 0};
            const Case identity{type, ReduceOp::avg, 1, all, 1};
            for (const Case& one : {c, identity}) {
                oracle::reduce(type, one.op, expected.data(), srcs, one.nsrc, all, one.divisor);
                for (const Table* table : tables) {
                    reduce_with(*table, type, one.op, result.data(), nullptr, srcs, one.nsrc, all,
                                one.divisor, Store::cached, Store::cached);
                    report.check(equal(one, result.data(), expected.data()),
                                 describe(*table, one, "exhaustive"));
                }
                if (round != 0) break;
            }
        }
    }
}

// Every pair of 8-bit floats, in every reduction; and the sums of triples, which round once.
void check_float8_exhaustively(Report& report, const std::vector<const Table*>& tables) {
    constexpr size_t all = 1 << 16;
    std::vector<uint8_t> first(all), second(all), third(all), expected(all), result(all);
    std::mt19937_64 random(8);
    for (size_t i = 0; i < all; ++i) {
        first[i] = static_cast<uint8_t>(i);
        second[i] = static_cast<uint8_t>(i >> 8);
        third[i] = static_cast<uint8_t>(random());
    }
    const void* srcs[] = {first.data(), second.data(), third.data()};
    for (DType type : {DType::float8_e4m3fn, DType::float8_e5m2}) {
        for (size_t o = 0; o < num_reduce_ops; ++o) {
            const auto op = static_cast<ReduceOp>(o);
            if (!supports(type, op)) continue;
            for (size_t nsrc : {1, 2, 3}) {
                const Case c{type, op, nsrc, all, op == ReduceOp::avg ? 3u : 0u};
                oracle::reduce(type, op, expected.data(), srcs, nsrc, all, c.divisor);
                for (const Table* table : tables) {
                    reduce_with(*table, type, op, result.data(), nullptr, srcs, nsrc, all,
                                c.divisor, Store::cached, Store::cached);
                    report.check(equal(c, result.data(), expected.data()),
                                 describe(*table, c, "exhaustive"));
                }
            }
        }
    }
}

std::vector<float> hard_floats(size_t count) {
    Generator generator;
    const auto bytes = generator.elements(DType::float32, count);
    std::vector<float> values(count);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
}

// Numbers, the halves between neighbours, and the float32 next to those halves: where rounding
// errs.
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

// What widening makes of a NaN: see kernels.h.
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
    for (size_t count = 0; count < 70; ++count) {  // ends of vectors, and nothing behind them
        std::vector<float> few(count + 1, 5.0F);
        std::vector<Bits> back(count + 1, Bits{42});
        widen_with(table, type, few.data(), every.data(), count, nullptr);
        narrow_with(table, type, back.data(), few.data(), count);
        bool same = few[count] == 5.0F && back[count] == 42;
        for (size_t i = 0; i < count; ++i) same = same && back[i] == every[i];
        report.check(same, where + " count " + std::to_string(count));
    }
}

// A product is the fold of the elements with as many factors.
void check_scales(Report& report, const Table& table) {
    Generator generator;
    for (size_t t = 0; t < num_dtypes; ++t) {
        const auto type = static_cast<DType>(t);
        if (!supports(type, ReduceOp::premul_sum)) {
            report.check(table.find_scale(type) == nullptr, "a scale too many");
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

void check_copies(Report& report, const std::vector<const Table*>& tables) {
    constexpr Store stores[] = {Store::cached, Store::streaming};
    std::mt19937_64 random(7);
    for (const Table* table : tables) {
        for (size_t bytes : {0, 1, 7, 63, 64, 65, 127, 128, 1000, 4096, 5000, 20001}) {
            for (size_t offset : {0, 1, 13, 32, 48, 63}) {
                Buffer src(bytes, (offset * 5) % 64);
                for (size_t i = 0; i < bytes; ++i) src.data()[i] = static_cast<uint8_t>(random());
                for (Store store : stores) {
                    Buffer one(bytes, offset);
                    copy_with(*table, one.data(), src.data(), bytes, store);
                    report.check(std::memcmp(one.data(), src.data(), bytes) == 0, "copy");
                    for (Store store2 : stores) {
                        Buffer first(bytes, offset), second(bytes, (offset * 3) % 64);
                        copy2_with(*table, first.data(), second.data(), src.data(), bytes, store,
                                   store2);
                        report.check(std::memcmp(first.data(), src.data(), bytes) == 0 &&
                                         std::memcmp(second.data(), src.data(), bytes) == 0,
                                     "copy2");
                    }
                }
            }
        }
    }
}

}  // namespace

int main() {
    const Table* found[max_tables];
    const std::vector<const Table*> tables(found, found + runnable_tables(found));
    std::printf("using %s; testing", isa());
    for (const Table* table : tables) std::printf(" %s", table->name);
    std::printf("\n");
    Report report;
    check_copies(report, tables);
    check_conversions(report, tables);
    check_narrow_exhaustively(report, tables);
    check_float8_exhaustively(report, tables);
    check_reductions(report, tables);
    return report.finish();
}
