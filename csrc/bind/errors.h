// The core's faults as the exceptions of unisono.errors, and Python's signals as the core's.
#pragma once

#include <nanobind/nanobind.h>

#include "waiter.h"

namespace unisono::bind {

void register_errors(nanobind::module_& module);

// Asks Python whether a signal handler has raised; takes the GIL for as long.
[[nodiscard]] Interrupted python_signals();

}  // namespace unisono::bind
