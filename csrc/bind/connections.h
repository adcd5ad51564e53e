#pragma once

#include <nanobind/nanobind.h>

#include "execution/group.h"

namespace unisono::bind {

// Adds the methods that only a group on several hosts needs.
void bind_hosts(nanobind::class_<Group>& group);

}  // namespace unisono::bind
