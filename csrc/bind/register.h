#pragma once

#include <nanobind/nanobind.h>

namespace unisono::bind {

void register_array_bindings(nanobind::module_& module);
void register_c_interface(nanobind::module_& module);
void register_fast_path(nanobind::module_& module);
void register_group(nanobind::module_& module);
void register_kernel_calls(nanobind::module_& module);
void register_machine(nanobind::module_& module);
void register_narrow_floats(nanobind::module_& module);
void register_planned_tensors(nanobind::module_& module);
void register_point_to_point(nanobind::module_& module);
void register_recorded_runs(nanobind::module_& module);
void register_simulator(nanobind::module_& module);
void register_slot(nanobind::module_& module);
void register_timeline_ring(nanobind::module_& module);
void register_tls_sockets(nanobind::module_& module);
void register_voted_calls(nanobind::module_& module);
void register_windows(nanobind::module_& module);

}  // namespace unisono::bind
