#include "kernels/body.h"

namespace unisono::kernels {
namespace {

// Returns only the functions that differ from AVX-512 with VBMI.
constexpr Table bfloat16_table() {
    Table table{"avx512bf16", &avx512vbmi_table, stream_copy, vector_copy, {}, {}, {}};
    add_narrow_sums<NativeBfloat16>(table, DType::bfloat16);
    return table;
}

}  // namespace

constinit const Table avx512bf16_table = bfloat16_table();

}  // namespace unisono::kernels
