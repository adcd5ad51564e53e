#pragma once

#include <nanobind/nanobind.h>

#include "execution/group.h"

namespace unisono::bind {

// Returns a function that makes transports over the objects that `make_library(kind)` returns.
// These objects implement the protocol `MessageLibrary` of `_native.pyi`. If `make_library` is
// None, returns an empty function.
[[nodiscard]] MakeTransport transports_of(const nanobind::object& make_library);

}  // namespace unisono::bind
