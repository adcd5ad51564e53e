// The core's faults as the exceptions of unisono.errors, and Python's signals as the core's.
#pragma once

#include <nanobind/nanobind.h>

#include "error.h"
#include "waiter.h"

namespace unisono::bind {

void register_errors(nanobind::module_& module);

// What it says, whatever bytes a peer may have said it with.
[[nodiscard]] nanobind::object text_of(const Error& error);

// What a Python callback raised, as the core's error.
[[nodiscard]] Error error_from(const nanobind::python_error& raised);

// Asks Python whether a signal handler has raised; takes the GIL for as long.
[[nodiscard]] Interrupted python_signals();

}  // namespace unisono::bind
