#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "execution/group.h"

namespace unisono::bind {

// A Python object, held by threads that need not have the GIL.
[[nodiscard]] std::shared_ptr<void> hold(const nanobind::object& object);

// Makes wires over what `make_carrier(kind)` returns: a Python object like
// `transport.mpi_wire.Carrier`. None: makes no wires.
[[nodiscard]] MakeWire wires_of(const nanobind::object& make_carrier);

}  // namespace unisono::bind
