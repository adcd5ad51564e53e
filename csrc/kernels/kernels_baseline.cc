#include "kernels/body.h"

namespace unisono::kernels {

#if defined(__ARM_NEON)
constexpr const char* baseline_name = "neon";
#else
constexpr const char* baseline_name = "baseline";
#endif

constinit const Table baseline_table = full_table(baseline_name);

}  // namespace unisono::kernels
