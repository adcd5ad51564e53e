#pragma once

#include <nanobind/nanobind.h>

namespace unisono::bind {

void register_c_interface(nanobind::module_& module);
void register_convert(nanobind::module_& module);
void register_group(nanobind::module_& module);
void register_kernel_calls(nanobind::module_& module);
void register_machine(nanobind::module_& module);
void register_memory(nanobind::module_& module);
void register_messages(nanobind::module_& module);
void register_planned_tensors(nanobind::module_& module);
void register_quick(nanobind::module_& module);
void register_recorded_runs(nanobind::module_& module);
void register_simulator(nanobind::module_& module);
void register_slots(nanobind::module_& module);
void register_timeline(nanobind::module_& module);
void register_tls(nanobind::module_& module);
void register_voted_calls(nanobind::module_& module);
void register_windows(nanobind::module_& module);

}  // namespace unisono::bind
