// Bindings of the ring of a rank's last events.
#include "bind/timeline_ring.h"

#include "bind/register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {

void register_timeline_ring(nb::module_& m) {
    nb::class_<TimelineRing>(m, "TimelineRing", nb::is_weak_referenceable())
        .def(nb::init<Address, uint64_t, nb::object, nb::dict, nb::callable, nb::callable,
                      nb::object>(),
             "entries"_a, "count"_a, "keep"_a, "ids"_a, "add"_a, "name_thread"_a, "clock"_a.none())
        .def("record",
             nb::overload_cast<uint16_t, nb::str, int64_t, int64_t, int64_t, int64_t>(
                 &TimelineRing::record),
             "kind"_a, "name"_a, "number"_a = 0, "value"_a = 0, "begun_ns"_a = 0, "ended_ns"_a = 0)
        .def("disown", &TimelineRing::disown);
}

}  // namespace unisono::bind
