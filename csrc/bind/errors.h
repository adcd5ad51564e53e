// Conversions of the core's faults to the exceptions of unisono.errors, and of Python's signals to
// interruptions of the core.
#pragma once

#include <nanobind/nanobind.h>

#include "core/error.h"
#include "memory/waiter.h"

namespace unisono::bind {

void register_errors(nanobind::module_& module);

// Returns the error's text as `str`, even if a peer sent bytes that are not UTF-8.
[[nodiscard]] nanobind::object text_of(const Error& error);

// Returns the Python exception for an error.
[[nodiscard]] nanobind::object exception_of(const Error& error);

// Throws the exception of a Python callback as an error of the core. An exception that is not an
// `Exception`, such as KeyboardInterrupt, later returns to Python unchanged.
[[noreturn]] void throw_error_of(const nanobind::python_error& raised);

// Raises TimeoutError: `what` ("the call is") still under way after the limit of a wait, not of the
// call.
[[noreturn]] void raise_late(const char* what, double limit_s);

// Returns a function that asks Python if a signal handler has raised an exception. The function
// holds the GIL while it asks.
[[nodiscard]] Interrupted python_signals();

}  // namespace unisono::bind
