// The operators that a program makes with MPI_Op_create, recognised by what they do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace unisono::mpi {

// Combines `*count` elements of `in` and of `both` into `both`.
using UserFunction = void (*)(void* in, void* both, int* count, void** type);

// A reduction of unisono.h.
struct Reduction {
    uint32_t dtype;
    uint32_t reduction;
    friend bool operator==(const Reduction&, const Reduction&) = default;
};

// Returns the sum, the maximum or the minimum of 16-bit floats that the function computes. Returns
// nothing for all others.
[[nodiscard]] std::optional<Reduction> recognised(UserFunction function);

}  // namespace unisono::mpi
