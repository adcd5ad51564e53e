#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "execution/group.h"

namespace unisono::bind {

// Holds a Python object for threads that may not have the GIL.
[[nodiscard]] std::shared_ptr<void> hold(const nanobind::object& object);

// Returns a function that makes transports over the objects that `make_library(kind)` returns.
// These objects implement the protocol `MessageLibrary` of `_native.pyi`. If `make_library` is
// None, returns an empty function.
[[nodiscard]] MakeTransport transports_of(const nanobind::object& make_library);

}  // namespace unisono::bind
