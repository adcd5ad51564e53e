"""Every private name of torch that Unisono uses, and nothing else.

In torch, a Python class can be a whole process group, but some features need private names. All are
in this folder, so that a new torch version requires a review of these files only. `names.py`
lists them for a test that checks their existence.
"""

from unisono.torch_backend.private.active_calls import batch_under_way, is_called_by
from unisono.torch_backend.private.attention import attention_on_cpu, attention_on_cpu_backward
from unisono.torch_backend.private.backward import (
    gradient_hooks,
    is_in_backward,
    remove_gradient_hooks,
    run_after_backward,
    saved_by,
    with_gradient_hooks,
)
from unisono.torch_backend.private.compilation import hide_from_dynamo
from unisono.torch_backend.private.group_making import (
    add_backends,
    coalesces,
    gloo_class,
    gloo_options,
    gloo_threads,
    group_being_made,
    make_group,
    prefixed,
    set_default_backend,
)
from unisono.torch_backend.private.group_tables import (
    backends_by_device,
    groups_of_torch,
    make_default,
    register_group,
    rename_backend,
)
from unisono.torch_backend.private.modules import (
    drop_probability,
    forget_forward_passes,
    forget_meshes,
    has_hooks,
    hooks_before,
    is_spectral_norm,
    is_type_check,
    own_buffers,
    own_children,
    own_parameters,
    pipeline_stage_base,
    skip_message_setup,
    split_groups,
    whole_parameter,
)
from unisono.torch_backend.private.placeholders import (
    BACKEND_METHODS,
    GROUP_METHODS,
    ProcessGroupBase,
    WorkBase,
    attach_placeholder,
    device_types,
    name_group,
    serve_device,
)
from unisono.torch_backend.private.profiling import (
    DTYPE_NAMES,
    current_stack,
    is_profiling,
    readable_stacks,
    span,
)
from unisono.torch_backend.private.replacement import (
    replace_function,
    replace_logging_data,
    replace_reading_of_profiles,
)
from unisono.torch_backend.private.streams import current_stream_handle
from unisono.torch_backend.private.tensors import (
    flatten,
    is_view,
    map_tensors,
    storage_number,
    storage_uses,
    unflatten,
    version_of,
    without_view,
)

__all__ = [
    "BACKEND_METHODS",
    "DTYPE_NAMES",
    "GROUP_METHODS",
    "ProcessGroupBase",
    "WorkBase",
    "add_backends",
    "attach_placeholder",
    "attention_on_cpu",
    "attention_on_cpu_backward",
    "backends_by_device",
    "batch_under_way",
    "coalesces",
    "current_stack",
    "current_stream_handle",
    "device_types",
    "drop_probability",
    "flatten",
    "forget_forward_passes",
    "forget_meshes",
    "gloo_class",
    "gloo_options",
    "gloo_threads",
    "gradient_hooks",
    "group_being_made",
    "groups_of_torch",
    "has_hooks",
    "hide_from_dynamo",
    "hooks_before",
    "is_called_by",
    "is_in_backward",
    "is_profiling",
    "is_spectral_norm",
    "is_type_check",
    "is_view",
    "make_default",
    "make_group",
    "map_tensors",
    "name_group",
    "own_buffers",
    "own_children",
    "own_parameters",
    "pipeline_stage_base",
    "prefixed",
    "readable_stacks",
    "register_group",
    "remove_gradient_hooks",
    "rename_backend",
    "replace_function",
    "replace_logging_data",
    "replace_reading_of_profiles",
    "run_after_backward",
    "saved_by",
    "serve_device",
    "set_default_backend",
    "skip_message_setup",
    "span",
    "split_groups",
    "storage_number",
    "storage_uses",
    "unflatten",
    "version_of",
    "whole_parameter",
    "with_gradient_hooks",
    "without_view",
]
