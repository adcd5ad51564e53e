#include "core/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>
#include <cstring>

namespace unisono {
namespace {

#if defined(__x86_64__)

constexpr bool all(uint32_t word, uint32_t bits) noexcept {
    return (word & bits) == bits;
}

// Returns the parts of the registers that the operating system saves.
uint32_t saved_state() noexcept {
    uint32_t low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// The compilers' __builtin_cpu_supports is not used: it needs their runtime library, and that of
// zig 0.17, with which the wheels are built, answers that a CPU supports nothing. Source: Intel 64
// and IA-32 Architectures Software Developer's Manual, volume 2, CPUID, and volume 1, section 13.2.
CpuFeatures read() noexcept {
    constexpr uint32_t usable = bit_OSXSAVE | bit_AVX, ymm = 0x06, zmm = 0xE6;
    constexpr uint32_t avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    CpuFeatures found;
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return found;
    const uint32_t maker[] = {b, d, c};
    found.intel = std::memcmp(maker, "GenuineIntel", sizeof maker) == 0;
    found.amd = std::memcmp(maker, "AuthenticAMD", sizeof maker) == 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, usable)) return found;
    const bool f16c = all(c, bit_F16C);
    const uint32_t saved = saved_state();
    if (!all(saved, ymm) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    found.avx2 = f16c && all(b, bit_AVX2);
    found.avx512 = found.avx2 && all(saved, zmm) && all(b, avx512);
    found.avx512vbmi = found.avx512 && all(c, bit_AVX512VBMI);
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d))
        found.avx512bf16 = found.avx512 && all(a, bit_AVX512BF16);
    return found;
}

#else

CpuFeatures read() noexcept {
    return {};
}

#endif

}  // namespace

const CpuFeatures& cpu_features() noexcept {
    static const CpuFeatures found = read();
    return found;
}

}  // namespace unisono
