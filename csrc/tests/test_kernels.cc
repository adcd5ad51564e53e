// Tests every reduction and copy of every instruction set that this CPU has. The results must equal
// those of the oracle bit for bit.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "core/cpu_features.h"
#include "tests/elements.h"

namespace {

using namespace unisono;
using namespace unisono::test;

// How the operands of a test case lie in memory, and how its destinations are written.
struct Layout {
    const char* name;
    // Operand k begins at k times this offset, in bytes, or in elements if `elements`.
    size_t offset;
    bool elements;
    int alias;  // index of the source that dst aliases (-1: the last source), or none
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

// Widens and rounds every 16-bit float, and multiplies each by 64 random partners.
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

// Reduces every pair of 8-bit floats by every operation, and sums triples, which round only once.
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

void check_copies(Report& report, const std::vector<const Table*>& tables) {
    constexpr Store stores[] = {Store::cached, Store::streaming};
    std::mt19937_64 random(7);
    for (const Table* table : tables) {
        for (size_t bytes : {0, 1, 7, 63, 64, 65, 127, 128, 1000, 4096, 5000, 20001}) {
            for (size_t offset : {0, 1, 13, 32, 48, 63}) {
                Buffer src(bytes, (offset * 5) % 64);
                for (size_t i = 0; i < bytes; ++i) src.data()[i] = static_cast<uint8_t>(random());
                Buffer plain(bytes, offset);
                table->vector_copy(plain.data(), src.data(), bytes);
                report.check(std::memcmp(plain.data(), src.data(), bytes) == 0, "vector copy");
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

// The compiler asks its own runtime library about the CPU; cpu_features.cc says why the core does
// not.
void check_features(Report& report) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    const CpuFeatures& cpu = cpu_features();
    report.check(cpu.intel == (__builtin_cpu_is("intel") != 0), "Intel");
    report.check(cpu.amd == (__builtin_cpu_is("amd") != 0), "AMD");
    report.check(cpu.avx2 == (__builtin_cpu_supports("avx2") != 0), "avx2");
    report.check(cpu.avx512 == (__builtin_cpu_supports("avx512bw") != 0), "avx512");
    report.check(cpu.avx512vbmi == (__builtin_cpu_supports("avx512vbmi") != 0), "avx512vbmi");
    report.check(cpu.avx512bf16 == (__builtin_cpu_supports("avx512bf16") != 0), "avx512bf16");
#else
    static_cast<void>(report);
#endif
}

}  // namespace

int main() {
    const std::vector<const Table*> tables = all_tables();
    std::printf("using %s; testing", isa());
    for (const Table* table : tables) std::printf(" %s", table->name);
    std::printf("\n");
    Report report;
    check_features(report);
    check_copies(report, tables);
    check_narrow_exhaustively(report, tables);
    check_float8_exhaustively(report, tables);
    check_reductions(report, tables);
    return report.finish();
}
