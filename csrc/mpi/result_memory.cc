#include "mpi/result_memory.h"

#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace unisono::mpi {
namespace {

constexpr uintptr_t kHugePage = 2 << 20;
constexpr size_t kLeastBytes = 2 * kHugePage;  // contains a whole page wherever it begins
constexpr std::array<size_t, UNISONO_COMPLEX128 + 1> kElementBytes = {4, 8, 2, 2, 1, 1, 2, 2,
                                                                      4, 4, 8, 8, 1, 8, 16};

}  // namespace

void use_huge_pages(const unisono_collective& collective, int ranks, const void* in,
                    void* out) noexcept {
    const bool gathers = collective.op == UNISONO_ALL_GATHER;
    const size_t bytes = collective.count * kElementBytes[collective.dtype] *
                         (gathers ? static_cast<size_t>(ranks) : 1);
    if (bytes < kLeastBytes || in == out || !out) return;
    const auto begin = reinterpret_cast<uintptr_t>(out);
    const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
    const uintptr_t last = (begin + bytes) & ~(kHugePage - 1);
    // Fails where the kernel has no huge pages. Then the pages are small, as before.
    static_cast<void>(madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE));
}

}  // namespace unisono::mpi
