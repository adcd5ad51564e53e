// Throughput of the kernels on one core, in GB of destination per second: the best of several runs.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/table.h"

namespace {

using namespace unisono;
using namespace unisono::kernels;

constexpr size_t max_bytes = 16 << 20;
constexpr size_t max_sources = 8;
constexpr size_t sizes[] = {1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20};

struct Memory {
    // These bytes are an ordinary number in every type: about 0.75, or 1.8 in float16.
    std::vector<uint8_t> bytes = std::vector<uint8_t>((max_sources + 2) * (max_bytes + 4096), 0x3F);

    // Returns operands whose addresses differ in their low bits.
    uint8_t* operand(size_t i) {
        const uintptr_t base = (reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64;
        return reinterpret_cast<uint8_t*>(base + i * (max_bytes + 832));
    }
};

template <class F>
double rate_Bps(size_t bytes, F call) {
    using clock = std::chrono::steady_clock;
    const size_t repeats = 1 + (4 << 20) / bytes;
    double best = 0;
    for (int run = 0; run < 7; ++run) {
        const auto start = clock::now();
        for (size_t i = 0; i < repeats; ++i) call();
        const double seconds = std::chrono::duration<double>(clock::now() - start).count();
        const double rate = static_cast<double>(bytes * repeats) / seconds;
        if (rate > best) best = rate;
    }
    return best;
}

struct Row {
    const char* name;
    DType type;
    ReduceOp op;
    size_t nsrc;
    uint32_t divisor;
    bool has_dst2;
    Store store, store2;
    bool in_place = false;
};
constexpr Store cached = Store::cached, streaming = Store::streaming;
constexpr Row rows[] = {
    {"f32 sum 2", DType::float32, ReduceOp::sum, 2, 0, false, cached, cached},
    {"f32 sum 2 in place", DType::float32, ReduceOp::sum, 2, 0, false, cached, cached, true},
    {"f32 sum 2 +dst2", DType::float32, ReduceOp::sum, 2, 0, true, cached, cached},
    {"f32 sum 2 nt", DType::float32, ReduceOp::sum, 2, 0, false, streaming, cached},
    {"f32 sum 2 +dst2 nt", DType::float32, ReduceOp::sum, 2, 0, true, cached, streaming},
    {"f32 sum 2 +dst2 both nt", DType::float32, ReduceOp::sum, 2, 0, true, streaming, streaming},
    {"f32 sum 3", DType::float32, ReduceOp::sum, 3, 0, false, cached, cached},
    {"f32 sum 4", DType::float32, ReduceOp::sum, 4, 0, false, cached, cached},
    {"f32 sum 5", DType::float32, ReduceOp::sum, 5, 0, false, cached, cached},
    {"f32 sum 8", DType::float32, ReduceOp::sum, 8, 0, false, cached, cached},
    {"f32 avg 2", DType::float32, ReduceOp::avg, 2, 2, false, cached, cached},
    {"f32 max 2", DType::float32, ReduceOp::max, 2, 0, false, cached, cached},
    {"f64 sum 2", DType::float64, ReduceOp::sum, 2, 0, false, cached, cached},
    {"bf16 sum 2", DType::bfloat16, ReduceOp::sum, 2, 0, false, cached, cached},
    {"bf16 sum 4", DType::bfloat16, ReduceOp::sum, 4, 0, false, cached, cached},
    {"bf16 sum 8", DType::bfloat16, ReduceOp::sum, 8, 0, false, cached, cached},
    {"bf16 avg 2", DType::bfloat16, ReduceOp::avg, 2, 2, false, cached, cached},
    {"bf16 max 2", DType::bfloat16, ReduceOp::max, 2, 0, false, cached, cached},
    {"f16 sum 2", DType::float16, ReduceOp::sum, 2, 0, false, cached, cached},
    {"f16 sum 4", DType::float16, ReduceOp::sum, 4, 0, false, cached, cached},
    {"e4m3fn sum 2", DType::float8_e4m3fn, ReduceOp::sum, 2, 0, false, cached, cached},
    {"e4m3fn sum 4", DType::float8_e4m3fn, ReduceOp::sum, 4, 0, false, cached, cached},
    {"e4m3fn max 2", DType::float8_e4m3fn, ReduceOp::max, 2, 0, false, cached, cached},
    {"e5m2 sum 2", DType::float8_e5m2, ReduceOp::sum, 2, 0, false, cached, cached},
    {"i32 land 2", DType::int32, ReduceOp::land, 2, 0, false, cached, cached},
    {"f32+i32 minloc 2", DType::float32_int32, ReduceOp::minloc, 2, 0, false, cached, cached},
    {"f64+i64 minloc 2", DType::float64_int64, ReduceOp::minloc, 2, 0, false, cached, cached},
    {"i32 sum 2", DType::int32, ReduceOp::sum, 2, 0, false, cached, cached},
    {"i32 avg 2", DType::int32, ReduceOp::avg, 2, 2, false, cached, cached},
    {"i64 prod 2", DType::int64, ReduceOp::prod, 2, 0, false, cached, cached},
    {"i64 avg 2", DType::int64, ReduceOp::avg, 2, 2, false, cached, cached},
    {"u8 prod 2", DType::uint8, ReduceOp::prod, 2, 0, false, cached, cached},
    {"u8 avg 2", DType::uint8, ReduceOp::avg, 2, 2, false, cached, cached},
    {"i8 max 2", DType::int8, ReduceOp::max, 2, 0, false, cached, cached},
    {"bool or 2", DType::boolean, ReduceOp::bor, 2, 0, false, cached, cached},
    {"c64 prod 2", DType::complex64, ReduceOp::prod, 2, 0, false, cached, cached},
    {"copy", DType::uint8, ReduceOp::sum, 1, 0, false, cached, cached},
    {"copy nt", DType::uint8, ReduceOp::sum, 1, 0, false, streaming, cached},
    {"copy2", DType::uint8, ReduceOp::sum, 1, 0, true, cached, cached},
    {"copy2 nt cached", DType::uint8, ReduceOp::sum, 1, 0, true, streaming, cached},
    {"copy2 both nt", DType::uint8, ReduceOp::sum, 1, 0, true, streaming, streaming},
};

constexpr struct {
    const char* name;
    DType type;
} narrow_types[] = {{"f16", DType::float16},
                    {"bf16", DType::bfloat16},
                    {"e4m3fn", DType::float8_e4m3fn},
                    {"e5m2", DType::float8_e5m2}};

// Prints the rate of `call(bytes)`. The bytes that it reads and the bytes that it writes add up to
// `bytes`.
template <class F>
void print_row(const char* name, const char* what, F call) {
    std::printf("%-8s%-16s", name, what);
    for (size_t bytes : sizes) std::printf("%9.1f", rate_Bps(bytes, [&] { call(bytes); }) / 1e9);
    std::printf("\n");
}

// Measures the GB read plus written per second. Compare with twice the rate of a copy.
void bench_conversions(const Table& table, Memory& memory) {
    uint8_t *a = memory.operand(0), *b = memory.operand(2);
    const float factor = 0.5F;
    for (const auto& [name, type] : narrow_types) {
        const size_t pair = size_of(type) + sizeof(float);
        float* wide = reinterpret_cast<float*>(a);
        print_row(name, "widen r+w",
                  [&](size_t n) { widen_with(table, type, wide, b, n / pair, nullptr); });
        print_row(name, "widen*f r+w",
                  [&](size_t n) { widen_with(table, type, wide, b, n / pair, &factor); });
        print_row(name, "narrow r+w",
                  [&](size_t n) { narrow_with(table, type, b, wide, n / pair); });
        print_row(name, "scale r+w",
                  [&](size_t n) { scale_with(table, type, b, b, n / 2 / size_of(type), &factor); });
    }
    print_row("f32", "scale r+w",
              [&](size_t n) { scale_with(table, DType::float32, b, b, n / 8, &factor); });
    print_row("any", "memcpy r+w", [&](size_t n) { std::memcpy(a, b, n / 2); });
}

void bench(const Table& table, Memory& memory) {
    std::printf("%-24s", table.name);
    for (size_t bytes : sizes) std::printf("%8zuK", bytes >> 10);
    std::printf("\n");
    for (const Row& row : rows) {
        std::printf("%-24s", row.name);
        const void* srcs[max_sources];
        for (size_t s = 0; s < row.nsrc; ++s) srcs[s] = memory.operand(s + 2);
        if (row.in_place) srcs[0] = memory.operand(0);
        uint8_t* dst2 = row.has_dst2 ? memory.operand(1) : nullptr;
        for (size_t bytes : sizes) {
            const double rate = rate_Bps(bytes, [&] {
                reduce_with(table, row.type, row.op, memory.operand(0), dst2, srcs, row.nsrc,
                            bytes / size_of(row.type), row.divisor, row.store, row.store2);
            });
            std::printf("%9.1f", rate / 1e9);
        }
        std::printf("\n");
    }
    bench_conversions(table, memory);
}

}  // namespace

// Optional arguments: the names of the instruction sets to measure.
int main(int argc, char** argv) {
    Memory memory;
    const Table* tables[max_tables];
    const size_t n = runnable_tables(tables);
    for (size_t t = 0; t < n; ++t) {
        bool wanted = argc < 2;
        for (int a = 1; a < argc; ++a)
            wanted = wanted || std::strcmp(argv[a], tables[t]->name) == 0;
        if (wanted) bench(*tables[t], memory);
    }
}
