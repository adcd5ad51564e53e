// The default floating-point mode of the CPU, independent of the mode that the calling thread has
// set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono::kernels {

// Makes this thread round to nearest even and keep subnormals, for the object's lifetime. Programs
// change the mode (torch.set_flush_denormal, libraries built with -ffast-math) for some threads
// only. A sum must not depend on the thread that computes it.
class DefaultFloatMode {
  public:
    DefaultFloatMode() noexcept : found_(get()) {
        if (changed()) set((found_ & ~kMode) | kDefault);
    }
    ~DefaultFloatMode() {
        if (changed()) set(found_);
    }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  private:
#if defined(__x86_64__)
    using Register = uint32_t;
    // Bits of MXCSR: flush to zero, rounding mode, subnormals as zeros.
    static constexpr Register kMode = 0xE040;
    static Register get() noexcept { return _mm_getcsr(); }
    static void set(Register mode) noexcept { _mm_setcsr(mode); }
#elif defined(__aarch64__)
    using Register = uint64_t;
    // Bits of FPCR: AHP (other format of float16), DN (default NaN), FZ and FZ16 (flush to zero),
    // RMode (rounding mode).
    static constexpr Register kMode = 0x7C80000;
    static Register get() noexcept {
        Register mode;
        __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set(Register mode) noexcept { __asm__ __volatile__("msr fpcr, %0" : : "r"(mode)); }
#else
    using Register = uint32_t;
    static constexpr Register kMode = 0;
    static Register get() noexcept { return 0; }
    static void set(Register) noexcept {}
#endif
    static constexpr Register kDefault = 0;

    [[nodiscard]] bool changed() const noexcept { return (found_ & kMode) != kDefault; }

    Register found_;
};

}  // namespace unisono::kernels
