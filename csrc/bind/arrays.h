// Recognises arrays and locates their elements, both for the fast path and for the checked path.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <unordered_map>
#include <vector>

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

// Arrays are NumPy arrays without a mask, and torch tensors, including instances of subclasses.
// Other buffers are not arrays, because their owners may free the memory while a call uses it.
//
// Caches element types. Requires the GIL.
class Arrays {
  public:
    enum class Kind : uint8_t { none, numpy, tensor };

    Arrays();

    [[nodiscard]] Kind kind_of(nanobind::handle object);
    // Returns the memory of a contiguous CPU array in native byte order, with an element type that
    // the library supports. Returns nothing for other objects, which are copied or refused. Throws
    // only Python exceptions that are not an `Exception`, such as KeyboardInterrupt.
    [[nodiscard]] std::optional<Located> locate(nanobind::handle array, bool writable);
    // Returns true if the object is a NumPy array (not of a subclass) with this `dtype` object and
    // these lengths of its dimensions.
    [[nodiscard]] bool is_plain(nanobind::handle object, nanobind::handle dtype,
                                const std::vector<int64_t>& shape) const noexcept;
    // Returns true if the object is a NumPy array whose elements must not be written.
    [[nodiscard]] bool is_read_only(nanobind::handle object) const noexcept;
    // Returns the storage of a tensor, or None for other objects. While it is kept, the memory of
    // the tensor stays, even if the program gives the tensor other memory by `set_`.
    [[nodiscard]] nanobind::object storage_of(nanobind::handle array);
    // Returns the element type of an array, in any byte order. Throws as `locate` does.
    [[nodiscard]] std::optional<DType> dtype_of(nanobind::handle array);

  private:
    struct Element {
        std::optional<DType> dtype;  // Nothing for an unsupported type.
        bool native;                 // True: elements are in the machine's byte order.
    };
    struct Known {
        Element element;
        nanobind::object type;  // kept alive, so that no other object gets its address
    };

    // A class of a module. Until the program imports the module, no object has this class.
    struct Class {
        nanobind::str module, name;
        nanobind::object type;  // null until the module is imported
        [[nodiscard]] bool has(nanobind::handle object);
    };

    [[nodiscard]] Element element_of(nanobind::handle type, Kind kind);
    Element learn(nanobind::handle type, Kind kind);
    [[nodiscard]] std::optional<Located> locate_numpy(nanobind::handle array, bool writable);
    [[nodiscard]] std::optional<Located> locate_tensor(nanobind::handle tensor);
    [[nodiscard]] std::optional<Located> locate_by_dlpack(const dlpack::ExchangeApi& api,
                                                          nanobind::handle tensor);
    [[nodiscard]] std::optional<Located> locate_by_methods(nanobind::handle tensor);
    [[nodiscard]] const dlpack::ExchangeApi* exchange_of_tensors();
    [[nodiscard]] bool is_lazy(nanobind::handle tensor, DType dtype) const;
    [[nodiscard]] nanobind::object type_of_elements(nanobind::handle array, Kind kind) const;

    PyTypeObject* ndarray_;
    Class masked_array_, tensor_;
    // No value until torch was asked for its interface.
    std::optional<const dlpack::ExchangeApi*> exchange_;
    nanobind::str dtype_, is_cpu_, data_ptr_, numel_, is_contiguous_, is_neg_, is_conj_, storage_;
    std::unordered_map<PyObject*, Known> known_;  // Keys: type objects of NumPy or torch.
    PyObject* last_type_ = nullptr;               // Type of the last array; also a key of `known_`.
    Element last_element_{};
};

}  // namespace unisono::bind
