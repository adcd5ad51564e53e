#include "kernels/body.h"

namespace unisono::kernels {

constinit const Table avx512_table = full_table("avx512");

}  // namespace unisono::kernels
