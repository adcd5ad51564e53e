// The faults of the core, and its only exception type.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace unisono {

// Kinds of failure. Shared memory holds these values. bind/ maps each value to one exception of
// unisono.errors.
enum class Fault : uint32_t {
    none = 0,
    peer_lost = 1,
    timeout = 2,
    mismatch = 3,
    aborted = 4,
    interrupted = 5,  // A Python signal handler has raised an exception.
    system = 6,       // The operating system refused: for example no memory, no descriptors.
    invalid = 7,      // A wrong argument of the caller.
    stranger = 8,     // The peer of a connection is not the expected one.
    unsupported = 9,  // This host does not support what was asked for.
};

class Error : public std::runtime_error {
  public:
    Error(Fault fault, const std::string& text) : std::runtime_error(text), fault_(fault) {}
    [[nodiscard]] Fault fault() const noexcept { return fault_; }

  private:
    Fault fault_;
};

// Converts a thrown exception to an Error. Returns a static Error if memory is exhausted.
[[nodiscard]] Error error_of(const std::exception& thrown) noexcept;

// Throws Fault::system with `what` and the text of errno.
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace unisono
