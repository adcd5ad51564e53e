#include "bind/arrays.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <nanobind/stl/string.h>
#include <numpy/ndarraytypes.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "bind/python_errors.h"
#include "core/call.h"

namespace nb = nanobind;

namespace unisono::bind {
namespace {

// Maximum number of known types, for programs that keep making new types. Most programs use a few.
constexpr size_t kMostKnown = 256;

// Clears the Python error that prevented locating an array, if there is an error. Returns nothing.
std::nullopt_t give_up() {
    if (PyErr_Occurred()) clear_error();
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

std::optional<DType> dtype_named(std::string_view name) {
    for (size_t i = 0; i < num_dtypes; ++i) {
        const auto type = static_cast<DType>(i);
        if (!is_pair(type) && name == name_of(type)) return type;
    }
    return std::nullopt;
}

struct Pair {
    // NumPy's short type names of the value and of the index: a letter for the kind, then the size
    // in bytes.
    std::string_view value, index;
    DType dtype;
};
constexpr std::array kPairs{
    Pair{"f4", "i4", DType::float32_int32}, Pair{"f8", "i8", DType::float64_int64},
    Pair{"i4", "i4", DType::int32_int32}, Pair{"i8", "i8", DType::int64_int64}};

// Returns the DType of (value, index) pairs that a structured NumPy type describes: two fields of
// the same size, without padding. Returns nothing for any other structured type.
std::optional<DType> pair_of(nb::handle type) {
    const nb::object names = type.attr("names");
    if (nb::len(names) != 2) return std::nullopt;
    std::string kinds[2];
    uint64_t offsets[2];
    for (size_t i = 0; i < 2; ++i) {
        const nb::object field = type.attr("fields")[names[i]];
        const auto order_and_kind = nb::cast<std::string>(field[0].attr("str"));
        kinds[i] = order_and_kind.substr(1);
        offsets[i] = nb::cast<uint64_t>(field[1]);
    }
    const auto bytes = nb::cast<uint64_t>(type.attr("itemsize"));
    for (const Pair& pair : kPairs) {
        if (kinds[0] == pair.value && kinds[1] == pair.index && bytes == size_of(pair.dtype) &&
            offsets[0] == 0 && offsets[1] == bytes / 2)
            return pair.dtype;
    }
    return std::nullopt;
}

// Returns the DType that has the name of a NumPy type. This also finds the extension types of
// ml_dtypes (bfloat16, 8-bit floats), because they have the same names as torch's types.
std::optional<DType> dtype_of_numpy(nb::handle type) {
    if (!type.attr("names").is_none()) return pair_of(type);
    const auto found = dtype_named(nb::cast<std::string>(type.attr("name")));
    if (found && nb::cast<uint64_t>(type.attr("itemsize")) != size_of(*found)) return std::nullopt;
    return found;
}

std::optional<DType> dtype_of_torch(nb::handle type) {
    const auto name = nb::cast<std::string>(nb::str(type));  // such as "torch.float32"
    return dtype_named(std::string_view(name).substr(name.find('.') + 1));
}

std::optional<DType> dtype_of_dlpack(const dlpack::Tensor& tensor) noexcept {
    if (tensor.lanes != 1) return std::nullopt;
    for (size_t i = 0; i < std::size(dlpack::kElements); ++i) {
        const auto [code, bits] = dlpack::kElements[i];
        if (tensor.code == code && tensor.bits == bits) return static_cast<DType>(i);
    }
    return std::nullopt;
}

// Returns the number of elements if the elements are contiguous in index order (C order).
std::optional<uint64_t> count_contiguous(const dlpack::Tensor& tensor) noexcept {
    int64_t count = 1;
    bool contiguous = true;
    for (int32_t i = tensor.dimensions; i-- > 0;) {
        const int64_t length = tensor.shape[i];
        if (tensor.strides && length != 1 && tensor.strides[i] != count) contiguous = false;
        count *= length;
    }
    if (!contiguous && count != 0) return std::nullopt;
    return static_cast<uint64_t>(count);
}

}  // namespace

bool Arrays::Class::has(nb::handle object) {
    if (!type.is_valid()) {
        const nb::object found = nb::steal(PyImport_GetModule(module.ptr()));
        if (found.is_valid()) type = nb::steal(PyObject_GetAttr(found.ptr(), name.ptr()));
        if (!type.is_valid()) {
            give_up();
            return false;
        }
    }
    return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(type.ptr()));
}

Arrays::Arrays()
    : ndarray_(
          reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").ptr())),
      masked_array_{interned("numpy.ma.core"), interned("MaskedArray"), {}},
      tensor_{interned("torch"), interned("Tensor"), {}},
      dtype_(interned("dtype")),
      is_cpu_(interned("is_cpu")),
      data_ptr_(interned("data_ptr")),
      numel_(interned("numel")),
      is_contiguous_(interned("is_contiguous")),
      is_neg_(interned("is_neg")),
      is_conj_(interned("is_conj")),
      storage_(interned("untyped_storage")) {}

Arrays::Kind Arrays::kind_of(nb::handle object) {
    if (Py_TYPE(object.ptr()) == ndarray_) return Kind::numpy;
    if (PyType_IsSubtype(Py_TYPE(object.ptr()), ndarray_))
        return masked_array_.has(object) ? Kind::none : Kind::numpy;
    return tensor_.has(object) ? Kind::tensor : Kind::none;
}

std::optional<Located> Arrays::locate(nb::handle array, bool writable) {
    switch (kind_of(array)) {
        case Kind::numpy:
            return locate_numpy(array, writable);
        case Kind::tensor:
            return locate_tensor(array);
        case Kind::none:
            break;
    }
    return std::nullopt;
}

bool Arrays::is_plain(nb::handle object, nb::handle dtype,
                      const std::vector<int64_t>& shape) const noexcept {
    if (Py_TYPE(object.ptr()) != ndarray_) return false;
    const PyArrayObject* fields = fields_of(object);
    return reinterpret_cast<PyObject*>(PyArray_DESCR(fields)) == dtype.ptr() &&
           std::equal(shape.begin(), shape.end(), PyArray_DIMS(fields),
                      PyArray_DIMS(fields) + PyArray_NDIM(fields));
}

bool Arrays::is_read_only(nb::handle object) const noexcept {
    return PyType_IsSubtype(Py_TYPE(object.ptr()), ndarray_) &&
           !(PyArray_FLAGS(fields_of(object)) & NPY_ARRAY_WRITEABLE);
}

nb::object Arrays::storage_of(nb::handle array) {
    if (kind_of(array) != Kind::tensor) return nb::none();
    nb::object found = call(array, storage_);
    if (found.is_valid()) return found;
    give_up();
    return nb::none();
}

std::optional<DType> Arrays::dtype_of(nb::handle array) {
    const Kind kind = kind_of(array);
    if (kind == Kind::none) return std::nullopt;
    const nb::object type = type_of_elements(array, kind);
    return type.is_valid() ? element_of(type, kind).dtype : give_up();
}

nb::object Arrays::type_of_elements(nb::handle array, Kind kind) const {
    if (kind == Kind::numpy)
        return nb::borrow(reinterpret_cast<PyObject*>(PyArray_DESCR(fields_of(array))));
    return nb::steal(PyObject_GetAttr(array.ptr(), dtype_.ptr()));
}

Arrays::Element Arrays::element_of(nb::handle type, Kind kind) {
    if (type.ptr() == last_type_) return last_element_;
    const auto found = known_.find(type.ptr());
    last_element_ = found != known_.end() ? found->second.element : learn(type, kind);
    last_type_ = type.ptr();
    return last_element_;
}

Arrays::Element Arrays::learn(nb::handle type, Kind kind) {
    Element element{std::nullopt, true};
    try {
        if (kind == Kind::numpy) {
            element = {dtype_of_numpy(type), nb::cast<bool>(type.attr("isnative"))};
        } else {
            element = {dtype_of_torch(type), true};
        }
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;
    }
    if (known_.size() >= kMostKnown) known_.clear();
    known_.insert_or_assign(type.ptr(), Known{element, nb::borrow(type)});
    return element;
}

// Locates a NumPy array without the buffer protocol. NumPy's buffer protocol formats the element
// type as text at each call, which takes as long as the rest of a small call.
std::optional<Located> Arrays::locate_numpy(nb::handle array, bool writable) {
    const PyArrayObject* fields = fields_of(array);
    const int flags = PyArray_FLAGS(fields);
    if (!(flags & NPY_ARRAY_C_CONTIGUOUS) || (writable && !(flags & NPY_ARRAY_WRITEABLE)))
        return std::nullopt;
    const Element element =
        element_of(reinterpret_cast<PyObject*>(PyArray_DESCR(fields)), Kind::numpy);
    if (!element.dtype || !element.native) return std::nullopt;
    return Located{reinterpret_cast<Address>(PyArray_DATA(fields)),
                   count_of(fields) * size_of(*element.dtype), *element.dtype};
}

// Returns torch's DLPack exchange interface, or nullptr if torch has none.
const dlpack::ExchangeApi* Arrays::exchange_of_tensors() {
    if (exchange_) return *exchange_;
    const nb::object capsule =
        nb::steal(PyObject_GetAttrString(tensor_.type.ptr(), dlpack::kAttribute));
    const auto* found = static_cast<const dlpack::ExchangeApi*>(
        capsule.is_valid() ? PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule) : nullptr);
    if (found && (found->major != dlpack::kMajor || !found->describe)) found = nullptr;
    if (!found) give_up();
    exchange_ = found;
    return found;
}

// Returns true if the tensor's elements differ from the values in memory (lazy negation or
// conjugation).
bool Arrays::is_lazy(nb::handle tensor, DType dtype) const {
    return is_true(tensor, is_neg_) || (is_complex(dtype) && is_true(tensor, is_conj_));
}

// Locates a tensor as `locate_by_methods` does, with one call instead of five.
std::optional<Located> Arrays::locate_by_dlpack(const dlpack::ExchangeApi& api, nb::handle tensor) {
    dlpack::Tensor seen{};
    if (api.describe(tensor.ptr(), &seen) != 0) return give_up();
    const auto dtype = dtype_of_dlpack(seen);
    const auto count = count_contiguous(seen);
    if (!dtype || !count || seen.device_type != dlpack::kCpu) return std::nullopt;
    if (is_lazy(tensor, *dtype)) return give_up();
    const auto address = reinterpret_cast<Address>(seen.data) + seen.byte_offset;
    if (PyErr_Occurred() || (address == 0 && *count > 0)) return give_up();
    return Located{address, *count * size_of(*dtype), *dtype};
}

std::optional<Located> Arrays::locate_tensor(nb::handle tensor) {
    // A subclass may override Python's methods, so only torch.Tensor itself uses DLPack.
    const auto* const api = tensor.type().is(tensor_.type) ? exchange_of_tensors() : nullptr;
    return api ? locate_by_dlpack(*api, tensor) : locate_by_methods(tensor);
}

std::optional<Located> Arrays::locate_by_methods(nb::handle tensor) {
    const nb::object type = type_of_elements(tensor, Kind::tensor);
    if (!type.is_valid()) return give_up();
    const auto dtype = element_of(type, Kind::tensor).dtype;
    if (!dtype) return std::nullopt;
    if (nb::steal(PyObject_GetAttr(tensor.ptr(), is_cpu_.ptr())).ptr() != Py_True) return give_up();
    if (!is_true(tensor, is_contiguous_) || is_lazy(tensor, *dtype)) return give_up();
    const auto address = number(tensor, data_ptr_), count = number(tensor, numel_);
    if (PyErr_Occurred() || (address == 0 && count > 0)) return give_up();
    return Located{address, count * size_of(*dtype), *dtype};
}

}  // namespace unisono::bind
