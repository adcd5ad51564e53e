// The core's faults as the exceptions of unisono.errors, and Python's signals as the core's.
#pragma once

#include <nanobind/nanobind.h>

#include "core/error.h"
#include "memory/waiter.h"

namespace unisono::bind {

void register_errors(nanobind::module_& module);

// What it says, whatever bytes a peer may have said it with.
[[nodiscard]] nanobind::object text_of(const Error& error);

// The exception that Python raises for it.
[[nodiscard]] nanobind::object exception_of(const Error& error);

// Throws what a Python callback raised, as an error of the core. What is no `Exception` of Python,
// such as KeyboardInterrupt, comes out at the other end as it was.
[[noreturn]] void throw_error_of(const nanobind::python_error& raised);

// Asks Python whether a signal handler has raised; takes the GIL for as long.
[[nodiscard]] Interrupted python_signals();

}  // namespace unisono::bind
