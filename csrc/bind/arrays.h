// Arrays of kinds that Python has checked before, located without its help.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <unordered_map>

#include "buffer.h"
#include "types.h"

namespace unisono::bind {

class Arrays {
  public:
    Arrays();

    // Remembers what the elements of arrays of this one's type are; `located` is where it is.
    void learn(nanobind::handle array, const Located& located);
    // Nothing sends the caller the slow way.
    [[nodiscard]] std::optional<Located> locate(nanobind::handle array, bool writable) const;

  private:
    struct Kind {
        DType dtype;
        nanobind::object type;  // kept alive, so that its address stays its own
    };

    [[nodiscard]] bool is_ndarray(nanobind::handle array) const noexcept {
        return Py_TYPE(array.ptr()) == ndarray_;
    }
    [[nodiscard]] std::optional<DType> known(PyObject* type) const noexcept;
    [[nodiscard]] std::optional<Located> locate_ndarray(nanobind::handle array,
                                                        bool writable) const noexcept;
    [[nodiscard]] std::optional<Located> locate_tensor(nanobind::handle tensor) const;

    PyTypeObject* ndarray_;
    nanobind::str dtype_, is_cpu_, data_ptr_, numel_, is_contiguous_, is_neg_, is_conj_;
    std::unordered_map<PyObject*, Kind> kinds_;  // by NumPy's or torch's type of elements
};

}  // namespace unisono::bind
