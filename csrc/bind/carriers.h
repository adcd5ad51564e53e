#pragma once

#include <nanobind/nanobind.h>

#include "group.h"

namespace unisono::bind {

// Makes wires over what `make_carrier(kind)` returns: a Python object like
// `links.mpi_wire.Carrier`. None: makes no wires.
[[nodiscard]] MakeWire wires_of(const nanobind::object& make_carrier);

}  // namespace unisono::bind
