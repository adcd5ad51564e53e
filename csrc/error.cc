#include "error.h"

#include <cerrno>
#include <cstring>

namespace unisono {

void throw_errno(const std::string& what) {
    const int code = errno;
    throw Error(Fault::system, what + ": " + std::strerror(code));
}

}  // namespace unisono
