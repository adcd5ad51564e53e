#pragma once

#include <nanobind/nanobind.h>

#include "execution/group.h"

namespace unisono::bind {

// What a group of several hosts has more than one on a single host.
void bind_hosts(nanobind::class_<Group>& group);

}  // namespace unisono::bind
