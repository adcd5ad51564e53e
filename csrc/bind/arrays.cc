#include "arrays.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/ndarraytypes.h>

#include <utility>

namespace nb = nanobind;

namespace unisono::bind {
namespace {

// Programs use a few types; those who make new ones all the time must not fill the memory.
constexpr size_t kMostKinds = 256;

nb::str interned(const char* text) {
    return nb::steal<nb::str>(PyUnicode_InternFromString(text));
}

std::optional<Located> give_up() {
    PyErr_Clear();
    return std::nullopt;
}

nb::object call(nb::handle tensor, const nb::str& method) {
    PyObject* arguments[] = {tensor.ptr()};
    return nb::steal(PyObject_VectorcallMethod(method.ptr(), arguments,
                                               1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

bool is_true(nb::handle tensor, const nb::str& method) {
    return call(tensor, method).ptr() == Py_True;
}

uint64_t number(nb::handle tensor, const nb::str& method) {
    const nb::object found = call(tensor, method);
    return found.is_valid() ? PyLong_AsUnsignedLongLong(found.ptr()) : 0;
}

const PyArrayObject* fields_of(nb::handle array) noexcept {
    return reinterpret_cast<const PyArrayObject*>(array.ptr());
}

uint64_t count_of(const PyArrayObject* array) noexcept {
    uint64_t count = 1;
    for (int i = 0; i < PyArray_NDIM(array); ++i)
        count *= static_cast<uint64_t>(PyArray_DIMS(array)[i]);
    return count;
}

}  // namespace

Arrays::Arrays()
    : ndarray_(
          reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").ptr())),
      dtype_(interned("dtype")),
      is_cpu_(interned("is_cpu")),
      data_ptr_(interned("data_ptr")),
      numel_(interned("numel")),
      is_contiguous_(interned("is_contiguous")),
      is_neg_(interned("is_neg")),
      is_conj_(interned("is_conj")) {}

void Arrays::learn(nb::handle array, const Located& located) {
    const bool fits = is_ndarray(array)
                          ? count_of(fields_of(array)) * size_of(located.dtype) == located.bytes
                          : nb::hasattr(array, data_ptr_);
    if (!fits) return;
    if (kinds_.size() >= kMostKinds) kinds_.clear();
    nb::object type = array.attr(dtype_);
    PyObject* address = type.ptr();
    kinds_.insert_or_assign(address, Kind{located.dtype, std::move(type)});
}

std::optional<DType> Arrays::known(PyObject* type) const noexcept {
    const auto found = kinds_.find(type);
    return found == kinds_.end() ? std::nullopt : std::optional(found->second.dtype);
}

std::optional<Located> Arrays::locate(nb::handle array, bool writable) const {
    if (array.is_none()) return std::nullopt;
    if (is_ndarray(array)) return locate_ndarray(array, writable);
    if (PyObject_CheckBuffer(array.ptr())) return bind::locate(array, writable);
    return locate_tensor(array);
}

// The buffer protocol would have NumPy put the type of the elements into words, each time anew: as
// long as all else of a small call.
std::optional<Located> Arrays::locate_ndarray(nb::handle array, bool writable) const noexcept {
    const PyArrayObject* fields = fields_of(array);
    const int flags = PyArray_FLAGS(fields);
    if (!(flags & NPY_ARRAY_C_CONTIGUOUS) || (writable && !(flags & NPY_ARRAY_WRITEABLE)))
        return std::nullopt;
    const auto dtype = known(reinterpret_cast<PyObject*>(PyArray_DESCR(fields)));
    if (!dtype) return std::nullopt;
    return Located{reinterpret_cast<uintptr_t>(PyArray_DATA(fields)),
                   count_of(fields) * size_of(*dtype), *dtype};
}

// Tensors are known by their methods: torch is never named here.
std::optional<Located> Arrays::locate_tensor(nb::handle tensor) const {
    const nb::object type = nb::steal(PyObject_GetAttr(tensor.ptr(), dtype_.ptr()));
    if (!type.is_valid()) return give_up();
    const auto dtype = known(type.ptr());
    if (!dtype) return std::nullopt;
    if (nb::steal(PyObject_GetAttr(tensor.ptr(), is_cpu_.ptr())).ptr() != Py_True) return give_up();
    if (!is_true(tensor, is_contiguous_) || is_true(tensor, is_neg_)) return give_up();
    if (is_complex(*dtype) && is_true(tensor, is_conj_)) return give_up();
    const auto address = number(tensor, data_ptr_), count = number(tensor, numel_);
    if (PyErr_Occurred() || (address == 0 && count > 0)) return give_up();
    return Located{address, count * size_of(*dtype), *dtype};
}

}  // namespace unisono::bind
