// Names of Python attributes, and errors of Python code that C++ calls.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono::bind {

inline nanobind::str interned(const char* text) {
    return nanobind::steal<nanobind::str>(PyUnicode_InternFromString(text));
}

// Clears the current Python error. An exception that is not an `Exception`, such as
// KeyboardInterrupt, is not cleared but thrown.
inline void clear_error() {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) nanobind::raise_python_error();
    PyErr_Clear();
}

}  // namespace unisono::bind
