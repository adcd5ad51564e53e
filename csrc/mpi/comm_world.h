// What the program in Python provides to a library that another library loads as its MPI.
#pragma once

#include <cstdint>
#include <string>

#include "mpi/communicator.h"

namespace unisono::mpi {

// `join` returns the group of all ranks, which Python owns, and its timeout. After an error, it
// returns nullptr and writes a text; without a text, the process is alone. `check` returns 0, or
// writes why no communicator can be made. `flush` writes out what Python's streams have buffered.
// Each may be nullptr.
struct Program {
    unisono_group* (*join)(double* timeout_s, char* error, uint64_t size);
    int (*check)(char* error, uint64_t size);
    void (*flush)();
};

inline constexpr size_t kMostText = 1024;  // MPI_MAX_ERROR_STRING

[[nodiscard]] const Program& program() noexcept;

// Asks Python for the group of all ranks. Returns nullptr after an error, and writes its text.
[[nodiscard]] Communicator* join_world(std::string& error);

// The communicator of all ranks, or nullptr before it is joined. Lives as long as the process,
// which may end after Python.
[[nodiscard]] Communicator* world() noexcept;
void set_world(Communicator* joined);

// True when the interpreter ends: nothing may ask Python any more.
[[nodiscard]] bool has_ended() noexcept;
void set_ended() noexcept;

}  // namespace unisono::mpi
