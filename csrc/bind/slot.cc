#include "bind/slot.h"

#if !defined(Py_LIMITED_API)
#include <structmember.h>
#endif

#include <nanobind/stl/pair.h>

#include <string>
#include <utility>

#include "bind/register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

Py_ssize_t offset_of(nb::handle type, nb::handle name) {
    const nb::object found =
        nb::steal(PyType_Check(type.ptr()) ? PyObject_GetAttr(type.ptr(), name.ptr()) : nullptr);
    if (found.is_valid() && Py_TYPE(found.ptr()) == &PyMemberDescr_Type) {
#if defined(Py_LIMITED_API)
        return 0;
#else
        const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member;
        if (member->type == T_OBJECT_EX) return member->offset;
#endif
    }
    PyErr_Clear();
    const std::string text = std::string(nb::repr(type).c_str()) + " has no slot " +
                             nb::repr(name).c_str() + ": name it in __slots__";
    throw nb::type_error(text.c_str());
}

// Reads or writes one slot of many objects in one call from Python.
class SlotColumn {
  public:
    SlotColumn(nb::type_object type, nb::str name) : slot_(type, name), name_(std::move(name)) {}

    // Returns the values of the objects. Throws AttributeError for an object without a value.
    [[nodiscard]] nb::tuple values(const nb::tuple& objects) const {
        nb::object found = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(objects.size())));
        if (!found.is_valid()) nb::raise_python_error();
        for (size_t i = 0; i < objects.size(); ++i) {
            nb::object value = slot_.get(checked(objects[i]));
            if (!value.is_valid())
                throw nb::attribute_error(text_of(objects[i], " has no value in ").c_str());
            if (PyTuple_SetItem(found.ptr(), static_cast<Py_ssize_t>(i), value.release().ptr()) !=
                0)
                nb::raise_python_error();
        }
        return nb::borrow<nb::tuple>(found);
    }

    // Returns the values of the objects, and the contents of the slot `other` of each value. Sets
    // the slots of the objects to None.
    [[nodiscard]] std::pair<nb::tuple, nb::tuple> take(const nb::tuple& objects,
                                                       const SlotColumn& other) const {
        const nb::tuple found = values(objects);
        const nb::tuple others = other.values(found);
        fill(objects, nb::none());
        return {found, others};
    }

    // Gives all objects the same value.
    void fill(const nb::tuple& objects, nb::handle value) const {
        for (const nb::handle object : objects) slot_.set(checked(object), value);
    }

  private:
    [[nodiscard]] nb::handle checked(nb::handle object) const {
        if (!slot_.is_of(object)) throw nb::type_error(text_of(object, " has no slot ").c_str());
        return object;
    }
    [[nodiscard]] std::string text_of(nb::handle object, const char* fault) const {
        return std::string(nb::type_name(object.type()).c_str()) + fault + name_.c_str();
    }

    Slot slot_;
    nb::str name_;
};

}  // namespace

Slot::Slot(nb::handle type, nb::handle name)
    : type_(nb::borrow(type)), name_(nb::borrow(name)), offset_(offset_of(type, name)) {}

void register_slot(nb::module_& m) {
    nb::class_<SlotColumn>(m, "SlotColumn")
        .def(nb::init<nb::type_object, nb::str>(), "type"_a, "name"_a)
        .def("values", &SlotColumn::values, "objects"_a)
        .def("take", &SlotColumn::take, "objects"_a, "other"_a)
        .def("fill", &SlotColumn::fill, "objects"_a, "value"_a.none());
}

}  // namespace unisono::bind
