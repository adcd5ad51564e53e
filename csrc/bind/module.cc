// The extension module unisono._native. Only unisono.native imports it.
#include <nanobind/nanobind.h>

#include "bind/errors.h"
#include "bind/register.h"

NB_MODULE(_native, m) {
    // Turns off nanobind's warning about objects that are alive at interpreter exit. Communicators
    // may be alive then.
    nanobind::set_leak_warnings(false);
    unisono::bind::register_errors(m);
    unisono::bind::register_c_interface(m);
    unisono::bind::register_narrow_floats(m);
    unisono::bind::register_group(m);
    unisono::bind::register_kernel_calls(m);
    unisono::bind::register_machine(m);
    unisono::bind::register_array_bindings(m);
    unisono::bind::register_point_to_point(m);
    unisono::bind::register_planned_tensors(m);
    unisono::bind::register_fast_path(m);
    unisono::bind::register_recorded_runs(m);
    unisono::bind::register_simulator(m);
    unisono::bind::register_slot(m);
    unisono::bind::register_timeline_ring(m);
    unisono::bind::register_tls_sockets(m);
    unisono::bind::register_voted_calls(m);
    unisono::bind::register_windows(m);
}
