// Bindings of the properties of this machine.
#include <nanobind/nanobind.h>

#include "bind/gil.h"
#include "bind/register.h"
#include "core/progress_thread.h"
#include "execution/cpu_cores.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono::bind {

void register_machine(nb::module_& m) {
    m.def("probe_core_latency", &probe_core_latency_s, "samples"_a, nb::call_guard<WithoutGil>());
    m.def("meshed_cores", &meshed_cores);
    m.def("usable_cores", &usable_cores);
    m.def("in_progress_thread", [] { return in_progress_thread; });
    m.def("last_level_cache_bytes", &last_level_cache_bytes);
    m.def("settle_on_core", &settle_on_core, "index"_a);
    m.def("isa", &kernels::isa);
}

}  // namespace unisono::bind
