// A slot of a Python class: an attribute that is named in the class's `__slots__`.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono::bind {

// Reads and writes an attribute at its offset in the object, in less time than PyObject_GetAttr and
// PyObject_SetAttr. Python's limited API does not expose the offset, so builds for the limited API
// use these two functions. Requires the GIL.
class Slot {
  public:
    // Throws Python's TypeError if the class has no slot of this name.
    Slot(nanobind::handle type, nanobind::handle name);

    // Returns true if the object has this slot.
    [[nodiscard]] bool is_of(nanobind::handle object) const noexcept {
        return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type_.ptr())) != 0;
    }

#if defined(Py_LIMITED_API)
    // Returns the value, or null if no value is set. Requires an object that has this slot.
    [[nodiscard]] nanobind::object get(nanobind::handle object) const {
        nanobind::object found = nanobind::steal(PyObject_GetAttr(object.ptr(), name_.ptr()));
        if (!found.is_valid()) PyErr_Clear();
        return found;
    }
    // Sets the value. Requires an object that has this slot. May run Python code, because the old
    // value may be freed.
    void set(nanobind::handle object, nanobind::handle value) const {
        if (PyObject_SetAttr(object.ptr(), name_.ptr(), value.ptr()) != 0)
            nanobind::raise_python_error();
    }
#else
    [[nodiscard]] nanobind::object get(nanobind::handle object) const {
        return nanobind::borrow(place(object));
    }
    void set(nanobind::handle object, nanobind::handle value) const {
        PyObject*& held = place(object);
        PyObject* const before = held;
        held = value.inc_ref().ptr();
        Py_XDECREF(before);
    }
#endif

  private:
    [[nodiscard]] PyObject*& place(nanobind::handle object) const noexcept {
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset_);
    }

    nanobind::object type_, name_;
    Py_ssize_t offset_;  // in bytes; 0 and unused with the limited API
};

}  // namespace unisono::bind
