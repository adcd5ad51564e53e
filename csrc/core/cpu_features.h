// The maker of this CPU, and the instruction sets that it and its operating system support.
#pragma once

namespace unisono {

// All are false on other architectures than x86-64.
struct CpuFeatures {
    bool intel = false;
    bool amd = false;
    bool avx2 = false;        // with the conversions of float16 (f16c)
    bool avx512 = false;      // f, bw, vl and dq
    bool avx512vbmi = false;  // implies avx512
    bool avx512bf16 = false;  // implies avx512
};

const CpuFeatures& cpu_features() noexcept;

}  // namespace unisono
