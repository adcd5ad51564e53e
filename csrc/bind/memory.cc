#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "buffer.h"
#include "pack.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {
namespace {

class Buffer {
  public:
    explicit Buffer(nb::handle object)
        : held_(PyObject_GetBuffer(object.ptr(), &view_, PyBUF_RECORDS_RO) == 0) {
        if (!held_) PyErr_Clear();
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (held_) PyBuffer_Release(&view_);
    }
    [[nodiscard]] const Py_buffer* get() const noexcept { return held_ ? &view_ : nullptr; }

  private:
    Py_buffer view_{};
    bool held_;
};

std::optional<DType> integer(bool is_signed, Py_ssize_t bytes) {
    switch (bytes) {
        case 1:
            return is_signed ? DType::int8 : DType::uint8;
        case 2:
            return is_signed ? DType::int16 : DType::uint16;
        case 4:
            return is_signed ? DType::int32 : DType::uint32;
        case 8:
            return is_signed ? DType::int64 : DType::uint64;
        default:
            return std::nullopt;
    }
}

// The struct-module letter of one element; a letter's size is the machine's, so ask the item's.
std::optional<DType> dtype_of(const Py_buffer& view) {
    const char* format = view.format ? view.format : "B";
    if (*format == '<' || *format == '=' || *format == '@') ++format;
    const bool complex = *format == 'Z';
    if (complex) ++format;
    if (format[0] == '\0' || format[1] != '\0') return std::nullopt;
    if (complex) {
        if (format[0] == 'f') return DType::complex64;
        return format[0] == 'd' ? std::optional(DType::complex128) : std::nullopt;
    }
    switch (format[0]) {
        case 'f':
            return DType::float32;
        case 'd':
            return DType::float64;
        case 'e':
            return DType::float16;
        case '?':
            return DType::boolean;
        case 'b':
        case 'h':
        case 'i':
        case 'l':
        case 'q':
            return integer(true, view.itemsize);
        case 'B':
        case 'H':
        case 'I':
        case 'L':
        case 'Q':
            return integer(false, view.itemsize);
        default:
            return std::nullopt;
    }
}

}  // namespace

std::optional<Located> locate(nb::handle array, bool writable) {
    if (!PyObject_CheckBuffer(array.ptr())) return std::nullopt;
    const Buffer buffer(array);
    const Py_buffer* view = buffer.get();
    if (!view || (writable && view->readonly) || !PyBuffer_IsContiguous(view, 'C'))
        return std::nullopt;
    const auto dtype = dtype_of(*view);
    if (!dtype) return std::nullopt;
    return Located{reinterpret_cast<uintptr_t>(view->buf), static_cast<uint64_t>(view->len),
                   *dtype};
}

void register_memory(nb::module_& m) {
    m.def(
        "locate",
        [](nb::handle array, bool writable) -> nb::object {
            const auto found = locate(array, writable);
            if (!found) return nb::none();
            return nb::make_tuple(found->address, found->bytes,
                                  static_cast<uint32_t>(found->dtype));
        },
        "array"_a, "writable"_a);
    nb::class_<Pack>(m, "Pack")
        .def(nb::init<>())
        .def("add", &Pack::add, "address"_a, "bytes"_a, "keep"_a)
        .def("memory", &Pack::memory)
        .def("lengths", &Pack::lengths)
        .def("gather", &Pack::gather, "to"_a)
        .def("scatter", &Pack::scatter, "from_"_a);
    m.def("share_memory", &share_memory, "packs"_a, "spans"_a);
}

}  // namespace unisono::bind
