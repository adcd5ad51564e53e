#include <cstring>

#include "core/cpu_features.h"
#include "kernels/float_mode.h"
#include "kernels/table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono::kernels {
namespace {

// Size of a tile: data that is folded or copied before it is written to the second destination. A
// tile fits in the L1 cache.
constexpr size_t tile_bytes = 4096;
constexpr size_t line_bytes = 64;

uint8_t* as_bytes(void* p) {
    return static_cast<uint8_t*>(p);
}
const uint8_t* as_bytes(const void* p) {
    return static_cast<const uint8_t*>(p);
}

// Makes streaming stores visible before all later stores of this thread.
void fence(Store store) {
#if defined(__x86_64__)
    if (store == Store::streaming) _mm_sfence();
#else
    static_cast<void>(store);
#endif
}

// Returns true if the C library's copy is slow. It copies more than 2 KiB with `rep movsb`. On AMD
// cores (measured on Zen 3) this instruction is 20 times slower, at 2 GB/s, if the destination lies
// up to 31 bytes further into its page than the source. This case is frequent: NumPy arrays begin
// 16 bytes into a page, staging buffers at a page start.
bool library_copy_is_slow(const uint8_t* dst, const uint8_t* src, size_t bytes) {
#if defined(__x86_64__)
    constexpr size_t least_bytes = 2048, page_bytes = 4096, least_distance = 64;
    const size_t distance =
        (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(src)) % page_bytes;
    return bytes >= least_bytes && distance != 0 && distance < least_distance && cpu_features().amd;
#else
    static_cast<void>(dst), static_cast<void>(src), static_cast<void>(bytes);
    return false;
#endif
}

// Copies. After streaming stores, the caller must run a fence.
void write(const Table& table, uint8_t* dst, const uint8_t* src, size_t bytes, Store store) {
    if (store == Store::streaming) {
        table.stream_copy(dst, src, bytes);
    } else if (library_copy_is_slow(dst, src, bytes)) {
        table.vector_copy(dst, src, bytes);
    } else if (dst != src) {
        std::memcpy(dst, src, bytes);
    }
}

// Returns the length of the first tile. The tile ends on a cache line of `dst`, as far as elements
// allow, so that later tiles begin on a line. A line that is streamed in two parts costs twice as
// much, and each tile folds its ends separately.
size_t first_tile_bytes(const uint8_t* dst, size_t elem_bytes) {
    const size_t excess = reinterpret_cast<uintptr_t>(dst) % line_bytes;
    return tile_bytes - excess / elem_bytes * elem_bytes;
}

struct Target {
    uint8_t* dst;
    Store store;
};

// Calls tile(at, bytes) for each tile of the `bytes` bytes.
template <class F>
void for_each_tile(Target first, Target second, size_t bytes, size_t elem_bytes, F tile) {
    const bool only_second_streams =
        first.store == Store::cached && second.store == Store::streaming;
    size_t step = first_tile_bytes(only_second_streams ? second.dst : first.dst, elem_bytes);
    for (size_t at = 0; at < bytes; at += step, step = tile_bytes) {
        tile(at, step < bytes - at ? step : bytes - at);
    }
}

void copy2_tiled(const Table& table, Target first, Target second, const uint8_t* src,
                 size_t bytes) {
    for_each_tile(first, second, bytes, 1, [&](size_t at, size_t tile) {
        write(table, first.dst + at, src + at, tile, first.store);
        write(table, second.dst + at, src + at, tile, second.store);
    });
}

}  // namespace

void reduce_with(const Table& table, DType type, ReduceOp op, void* dst, void* dst2,
                 const void* const* srcs, size_t nsrc, size_t count, uint32_t divisor,
                 Store dst_store, Store dst2_store) {
    const size_t bytes = count * size_of(type);
    if (bytes == 0) return;
    const bool scaled = divisor != 0;
    const bool unchanged = type != DType::boolean && !is_logical(op);
    if (nsrc == 1 && !scaled && unchanged) {
        if (dst2 == nullptr) return copy_with(table, dst, srcs[0], bytes, dst_store);
        return copy2_with(table, dst, dst2, srcs[0], bytes, dst_store, dst2_store);
    }
    if (op == ReduceOp::premul_sum) op = ReduceOp::sum;
    if (scaled && op == ReduceOp::sum) op = ReduceOp::avg;
    if (!scaled && op == ReduceOp::avg) op = ReduceOp::sum;
    const Fold fold = table.find(type, op);
    const DefaultFloatMode mode;
    const auto* sources = reinterpret_cast<const uint8_t* const*>(srcs);

    if (dst2 == nullptr && dst_store == Store::cached) {
        return fold(as_bytes(dst), sources, nsrc, 0, bytes, divisor);
    }
    const Target first{as_bytes(dst), dst_store};
    const Target second{as_bytes(dst2), dst2 != nullptr ? dst2_store : Store::streaming};
    alignas(line_bytes) uint8_t scratch[tile_bytes];
    for_each_tile(first, second, bytes, size_of(type), [&](size_t at, size_t tile) {
        // The result is computed in a cached destination if either destination is cached.
        uint8_t* hot = first.store == Store::cached    ? first.dst + at
                       : second.store == Store::cached ? second.dst + at
                                                       : scratch;
        fold(hot, sources, nsrc, at, tile, divisor);
        if (first.store == Store::streaming) table.stream_copy(first.dst + at, hot, tile);
        if (second.dst != nullptr) write(table, second.dst + at, hot, tile, second.store);
    });
    fence(dst_store);
    if (dst2 != nullptr) fence(dst2_store);
}

void widen_with(const Table& table, DType type, float* dst, const void* src, size_t count,
                const float* factor) {
    const DefaultFloatMode mode;
    table.find_conversion(type).widen(dst, as_bytes(src), count, factor);
}

void narrow_with(const Table& table, DType type, void* dst, const float* src, size_t count) {
    const DefaultFloatMode mode;
    table.find_conversion(type).narrow(as_bytes(dst), src, count);
}

void scale_with(const Table& table, DType type, void* dst, const void* src, size_t count,
                const void* factor) {
    const DefaultFloatMode mode;
    const size_t factor_bytes = is_narrow_float(type) ? sizeof(float) : size_of(type);
    alignas(widest_vector_bytes) uint8_t repeated[widest_vector_bytes];
    for (size_t at = 0; at < sizeof repeated; at += factor_bytes)
        std::memcpy(repeated + at, factor, factor_bytes);
    table.find_scale(type)(as_bytes(dst), as_bytes(src), count * size_of(type), repeated);
}

void copy_with(const Table& table, void* dst, const void* src, size_t bytes, Store store) {
    if (dst == src || bytes == 0) return;
    write(table, as_bytes(dst), as_bytes(src), bytes, store);
    fence(store);
}

void copy2_with(const Table& table, void* dst, void* dst2, const void* src, size_t bytes,
                Store dst_store, Store dst2_store) {
    if (dst == src) return copy_with(table, dst2, src, bytes, dst2_store);
    if (dst2 == src) return copy_with(table, dst, src, bytes, dst_store);
    copy2_tiled(table, {as_bytes(dst), dst_store}, {as_bytes(dst2), dst2_store}, as_bytes(src),
                bytes);
    fence(dst_store);
    fence(dst2_store);
}

size_t runnable_tables(const Table* out[max_tables]) {
    size_t n = 0;
#if defined(__x86_64__) && !defined(UNISONO_BASELINE_ONLY)
    const CpuFeatures& cpu = cpu_features();
    // The bfloat16 table extends the VBMI table, so it needs both features. One generation of CPUs
    // has bfloat16 instructions without VBMI; it uses the plain AVX-512 table.
    if (cpu.avx512vbmi && cpu.avx512bf16) out[n++] = &avx512bf16_table;
    if (cpu.avx512vbmi) out[n++] = &avx512vbmi_table;
    if (cpu.avx512) out[n++] = &avx512_table;
    if (cpu.avx2) out[n++] = &avx2_table;
#endif
    out[n++] = &baseline_table;
    return n;
}

namespace {

const Table& best_table() {
    static const Table* const best = [] {
        const Table* tables[max_tables];
        runnable_tables(tables);
        return tables[0];
    }();
    return *best;
}

}  // namespace

void reduce(DType type, ReduceOp op, void* dst, void* dst2, const void* const* srcs, size_t nsrc,
            size_t count, uint32_t divisor, Store dst_store, Store dst2_store) {
    reduce_with(best_table(), type, op, dst, dst2, srcs, nsrc, count, divisor, dst_store,
                dst2_store);
}

void widen(DType type, float* dst, const void* src, size_t count, const float* factor) {
    widen_with(best_table(), type, dst, src, count, factor);
}

void narrow(DType type, void* dst, const float* src, size_t count) {
    narrow_with(best_table(), type, dst, src, count);
}

void scale(DType type, void* dst, const void* src, size_t count, const void* factor) {
    scale_with(best_table(), type, dst, src, count, factor);
}

void copy(void* dst, const void* src, size_t bytes, Store store) {
    copy_with(best_table(), dst, src, bytes, store);
}

void copy2(void* dst, void* dst2, const void* src, size_t bytes, Store dst_store,
           Store dst2_store) {
    copy2_with(best_table(), dst, dst2, src, bytes, dst_store, dst2_store);
}

const char* isa() {
    return best_table().name;
}

}  // namespace unisono::kernels
