#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/arrays.h"
#include "bind/buffer.h"
#include "bind/gil.h"
#include "bind/memory_overlap.h"
#include "bind/pack.h"
#include "bind/register.h"
#include "core/error.h"
#include "core/memory_hash.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {

void register_array_bindings(nb::module_& m) {
    nb::class_<Arrays>(m, "Arrays")
        .def(nb::init<>())
        .def(
            "takes",
            [](Arrays& self, nb::handle object) {
                return self.kind_of(object) != Arrays::Kind::none;
            },
            "object"_a.none())
        .def(
            "locate",
            [](Arrays& self, nb::handle array, bool writable) -> nb::object {
                const auto found = self.locate(array, writable);
                if (!found) return nb::none();
                return nb::make_tuple(found->address, found->bytes,
                                      static_cast<uint32_t>(found->dtype));
            },
            "array"_a.none(), "writable"_a)
        .def(
            "dtype_of",
            [](Arrays& self, nb::handle array) {
                const auto found = self.dtype_of(array);
                return found ? std::optional(static_cast<uint32_t>(*found)) : std::nullopt;
            },
            "array"_a.none())
        .def("storage_of", &Arrays::storage_of, "array"_a.none());
    nb::class_<Pack>(m, "Pack")
        .def(nb::init<>())
        .def("add", &Pack::add, "address"_a, "bytes"_a, "keep"_a)
        .def("memory", &Pack::memory)
        .def("lengths", &Pack::lengths)
        .def("gather", &Pack::gather, "to"_a)
        .def("scatter", &Pack::scatter, "from_"_a);
    m.def(
        "hash_memory",
        [](Address memory, uint64_t bytes, uint64_t seed, uint64_t first, uint64_t step) {
            if (step == 0) throw Error(Fault::invalid, "expected a step of 1 or more, got 0");
            const WithoutGil release;
            return hash_memory(at(memory), bytes, seed, first, step);
        },
        "memory"_a, "bytes"_a, "seed"_a, "first"_a = 0, "step"_a = 1);
    m.def("share_memory", &share_memory, "packs"_a, "spans"_a);
}

}  // namespace unisono::bind
