#include "mpi/huge_pages.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace unisono::mpi {
namespace {

constexpr uintptr_t kHugePage = 2 << 20;
constexpr size_t kLeastBytes = 2 * kHugePage;  // contains a whole page wherever it begins

}  // namespace

void use_huge_pages(const unisono_collective& collective, int ranks, const void* in,
                    void* out) noexcept {
    const bool gathers = collective.op == UNISONO_ALL_GATHER;
    const size_t bytes = collective.count * size_of(static_cast<DType>(collective.dtype)) *
                         (gathers ? static_cast<size_t>(ranks) : 1);
    if (bytes < kLeastBytes || in == out || !out) return;
    const auto begin = reinterpret_cast<uintptr_t>(out);
    const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
    const uintptr_t last = (begin + bytes) & ~(kHugePage - 1);
    // Fails where the kernel has no huge pages. Then the pages are small, as before.
    static_cast<void>(madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE));
}

}  // namespace unisono::mpi
