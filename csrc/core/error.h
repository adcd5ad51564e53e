// What can go wrong in the core, and the one exception type that carries it out.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace unisono {

// The values are stored in shared memory and mapped one to one onto unisono.errors by bind/.
enum class Fault : uint32_t {
    none = 0,
    peer_lost = 1,
    timeout = 2,
    mismatch = 3,
    aborted = 4,
    interrupted = 5,  // a Python signal handler raised: its exception is already set
    system = 6,       // the operating system refused: no memory, no descriptors
    invalid = 7,      // an argument that the caller got wrong
    stranger = 8,     // the other end of a connection is not whom it should be
    unsupported = 9,  // this host cannot do it
};

class Error : public std::runtime_error {
  public:
    Error(Fault fault, const std::string& text) : std::runtime_error(text), fault_(fault) {}
    [[nodiscard]] Fault fault() const noexcept { return fault_; }

  private:
    Fault fault_;
};

// What was thrown, as an Error; one that was made before where memory is lacking to make it.
[[nodiscard]] Error error_of(const std::exception& thrown) noexcept;

// Throws Fault::system with what the kernel said about `what`.
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace unisono
