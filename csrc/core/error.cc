#include "core/error.h"

#include <cerrno>
#include <cstring>
#include <new>

namespace unisono {
namespace {

const Error kNoMemory(Fault::system, "out of memory");

}  // namespace

Error error_of(const std::exception& thrown) noexcept {
    if (const auto* const error = dynamic_cast<const Error*>(&thrown)) return *error;
    if (dynamic_cast<const std::bad_alloc*>(&thrown)) return kNoMemory;
    try {
        return {Fault::system, thrown.what()};
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}

void throw_errno(const std::string& what) {
    const int code = errno;
    throw Error(Fault::system, what + ": " + std::strerror(code));
}

}  // namespace unisono
