// The functions of one instruction set. This header is internal to the kernels and their tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace unisono::kernels {

// Folds `bytes` bytes (whole elements) of each source, from offset `at`, into dst; see reduce().
using Fold = void (*)(uint8_t* dst, const uint8_t* const* srcs, size_t nsrc, size_t at,
                      size_t bytes, uint32_t divisor);

using Copy = void (*)(uint8_t* dst, const uint8_t* src, size_t bytes);

// `factor` may be null.
using Widen = void (*)(float* dst, const uint8_t* src, size_t count, const float* factor);
using Narrow = void (*)(uint8_t* dst, const float* src, size_t count);
struct Conversion {
    Widen widen;
    Narrow narrow;
};
// `factor` is repeated to fill widest_vector_bytes.
using Scale = void (*)(uint8_t* dst, const uint8_t* src, size_t bytes, const uint8_t* factor);
inline constexpr size_t widest_vector_bytes = 64;

struct Table {
    const char* name;
    const Table* base;  // Table that is searched for functions that are null here; may be null.
    Copy stream_copy;   // Copies by streaming stores; the caller must run a fence.
    Copy vector_copy;   // Copies by ordinary (cached) stores.
    Fold folds[num_dtypes][num_reduce_ops];
    Conversion conversions[num_dtypes];
    Scale scales[num_dtypes];

    constexpr Fold& at(DType type, ReduceOp op) {
        return folds[static_cast<size_t>(type)][static_cast<size_t>(op)];
    }

    Fold find(DType type, ReduceOp op) const {
        for (const Table* table = this; table != nullptr; table = table->base) {
            const Fold fold = table->folds[static_cast<size_t>(type)][static_cast<size_t>(op)];
            if (fold != nullptr) return fold;
        }
        return nullptr;
    }

    Conversion find_conversion(DType type) const {
        for (const Table* table = this; table != nullptr; table = table->base) {
            const Conversion found = table->conversions[static_cast<size_t>(type)];
            if (found.widen != nullptr) return found;
        }
        return {};
    }

    Scale find_scale(DType type) const {
        for (const Table* table = this; table != nullptr; table = table->base) {
            const Scale found = table->scales[static_cast<size_t>(type)];
            if (found != nullptr) return found;
        }
        return nullptr;
    }
};

// Each kernels_*.cc defines one table. The tables of other architectures are not linked.
extern const Table baseline_table;
extern const Table avx2_table;
extern const Table avx512_table;
extern const Table avx512vbmi_table;
extern const Table avx512bf16_table;

inline constexpr size_t max_tables = 5;

// Fills `out` with the tables that this CPU can run, best first. Returns their number.
size_t runnable_tables(const Table* out[max_tables]);

// The functions of kernels.h, with a given table.
void reduce_with(const Table& table, DType type, ReduceOp op, void* dst, void* dst2,
                 const void* const* srcs, size_t nsrc, size_t count, uint32_t divisor,
                 Store dst_store, Store dst2_store);
void widen_with(const Table& table, DType type, float* dst, const void* src, size_t count,
                const float* factor);
void narrow_with(const Table& table, DType type, void* dst, const float* src, size_t count);
void scale_with(const Table& table, DType type, void* dst, const void* src, size_t count,
                const void* factor);
void copy_with(const Table& table, void* dst, const void* src, size_t bytes, Store store);
void copy2_with(const Table& table, void* dst, void* dst2, const void* src, size_t bytes,
                Store dst_store, Store dst2_store);

}  // namespace unisono::kernels
