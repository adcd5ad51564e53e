#include "kernels/body.h"
#include "kernels/float8_vbmi.h"

namespace unisono::kernels {
namespace {

// Returns only the functions that differ from AVX-512.
constexpr Table byte_table() {
    Table table{"avx512vbmi", &avx512_table, stream_copy, vector_copy, {}, {}, {}};
    add_narrow_sums<VbmiFloat8<3, false>>(table, DType::float8_e4m3fn);
    add_narrow_sums<VbmiFloat8<2, true>>(table, DType::float8_e5m2);
    return table;
}

}  // namespace

constinit const Table avx512vbmi_table = byte_table();

}  // namespace unisono::kernels
