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

// Returns an attribute, or null after an error. The error is cleared, because the caller then takes
// another way.
inline nanobind::object attribute(nanobind::handle of, nanobind::handle name) {
    nanobind::object found = nanobind::steal(PyObject_GetAttr(of.ptr(), name.ptr()));
    if (!found.is_valid()) clear_error();
    return found;
}

}  // namespace unisono::bind
