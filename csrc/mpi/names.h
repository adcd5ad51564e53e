// The constants of MPI's ABI that the library serves. Handles are numbers of one word. A constant
// of type int is read from the lower half of its word, so the machine must be little-endian.
#pragma once

#include <bit>
#include <cstdint>

static_assert(std::endian::native == std::endian::little);

extern "C" {
using MPIABI_Comm = uintptr_t;
using MPIABI_Datatype = uintptr_t;
using MPIABI_Op = uintptr_t;
using MPIABI_Request = uintptr_t;
struct MPIABI_Status;
}

namespace unisono::mpi {

inline constexpr int kSuccess = 0;
inline constexpr int kUndefined = -32766;
inline constexpr int kMultiple = 3;  // MPI_THREAD_MULTIPLE

inline constexpr MPIABI_Comm kNullComm = 0;
inline constexpr MPIABI_Comm kWorld = 1;
inline constexpr MPIABI_Request kNullRequest = 0;
// Datatypes and operators are `kFirst` plus the number of a type or a reduction of unisono.h.
inline constexpr uintptr_t kFirstType = 0x100, kFirstReduction = 0x200, kFirstUnserved = 0x1000;

}  // namespace unisono::mpi
