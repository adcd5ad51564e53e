#include "kernels/body.h"

namespace unisono::kernels {

constinit const Table avx2_table = full_table("avx2");

}  // namespace unisono::kernels
