// Huge pages for large results: JAX and MLX allocate each result anew, and a fault for each page of
// 4 KiB can take longer than the collective.
#pragma once

#include "capi/unisono.h"

namespace unisono::mpi {

// Asks the kernel to fill the memory of a large result with huge pages, since the call will write
// all of it. Does nothing if the result is small or is written over the input.
void use_huge_pages(const unisono_collective& collective, int ranks, const void* in,
                    void* out) noexcept;

}  // namespace unisono::mpi
