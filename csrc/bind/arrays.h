// What is an array, and where its elements lie: one judge for the calls that are known and for all
// others.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <unordered_map>

#include "bind/buffer.h"
#include "bind/dlpack.h"
#include "core/types.h"

namespace unisono::bind {

// Memory of contiguous elements.
struct Located {
    Address address;
    uint64_t bytes;
    DType dtype;
};

// Arrays are NumPy's, without a mask, and torch's tensors, of subclasses too. Other buffers are
// none: their owners may give the memory back while a call uses it.
//
// Types of elements are remembered. To be used with the GIL.
class Arrays {
  public:
    enum class Kind : uint8_t { none, numpy, tensor };

    Arrays();

    [[nodiscard]] Kind kind_of(nanobind::handle object);
    // The memory of an array on the CPU whose elements are contiguous, in the machine's byte order
    // and of a type that is communicated. Nothing of all else, which takes a copy or is refused.
    // Throws what is no `Exception` of Python, such as KeyboardInterrupt, alone.
    [[nodiscard]] std::optional<Located> locate(nanobind::handle array, bool writable);
    // The type of an array's elements, in whatever order their bytes are. Throws as `locate` does.
    [[nodiscard]] std::optional<DType> dtype_of(nanobind::handle array);

  private:
    struct Element {
        std::optional<DType> dtype;  // nothing: it is not communicated
        bool native;                 // the bytes are in the machine's order
    };
    struct Known {
        Element element;
        nanobind::object type;  // kept alive, so that its address stays its own
    };

    // A class of a module that the program imports, or not: then no object is of it.
    struct Class {
        nanobind::str module, name;
        nanobind::object type;  // null until the module is found
        [[nodiscard]] bool has(nanobind::handle object);
    };

    [[nodiscard]] Element element_of(nanobind::handle type, Kind kind);
    Element learn(nanobind::handle type, Kind kind);
    [[nodiscard]] std::optional<Located> locate_numpy(nanobind::handle array, bool writable);
    [[nodiscard]] std::optional<Located> locate_tensor(nanobind::handle tensor);
    [[nodiscard]] std::optional<Located> look_at_tensor(const dlpack::ExchangeApi& api,
                                                        nanobind::handle tensor);
    [[nodiscard]] std::optional<Located> ask_tensor(nanobind::handle tensor);
    [[nodiscard]] const dlpack::ExchangeApi* exchange_of_tensors();
    [[nodiscard]] bool is_lazy(nanobind::handle tensor, DType dtype) const;
    [[nodiscard]] nanobind::object type_of_elements(nanobind::handle array, Kind kind) const;

    PyTypeObject* ndarray_;
    Class masked_array_, tensor_;
    std::optional<const dlpack::ExchangeApi*> exchange_;  // once torch was asked for it
    nanobind::str dtype_, is_cpu_, data_ptr_, numel_, is_contiguous_, is_neg_, is_conj_;
    std::unordered_map<PyObject*, Known> known_;  // by NumPy's or torch's type of elements
    PyObject* last_type_ = nullptr;               // of the last array, which is among the known
    Element last_element_{};
};

}  // namespace unisono::bind
