"""Every private name of torch that Unisono uses, and nothing else.

In torch, a Python class can be a whole process group, but some features need private names. All are
in this file, so that a new torch version requires a review of one file. `PRIVATE_NAMES` lists them
for a test that checks their existence.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d
from torch._C import _profiler as _torch_profiler
from torch.nn.utils import parametrizations
from torch.utils import _pytree

# Typed as Any: the stubs lack some of these names, and cannot describe methods that accept the
# calling conventions of several torch versions.
_c10d: Any = _distributed_c10d
_parametrizations: Any = parametrizations
_profiler: Any = _torch_profiler
_torch_groups: Any = dist.distributed_c10d
WorkBase: Any = _distributed_c10d.Work
ProcessGroupBase: Any = dist.ProcessGroup

PRIVATE_NAMES: Final = (
    "torch._C._distributed_c10d.Work",
    "torch._C._distributed_c10d.FakeProcessGroup",
    "torch._C._distributed_c10d.FakeProcessGroup.Options",
    "torch._C._distributed_c10d.FakeProcessGroup.Options.error_on_collective",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal",
    "torch._C._distributed_c10d.ProcessGroup._register_backend",
    "torch._C._distributed_c10d.ProcessGroup._set_default_backend",
    "torch._C._distributed_c10d.ProcessGroup._set_group_name",
    "torch._C._distributed_c10d.ProcessGroup._set_group_desc",
    "torch._C._distributed_c10d.ProcessGroup._get_backend",
    "torch._C._distributed_c10d.ProcessGroup._device_types",
    "torch._C._distributed_c10d.ProcessGroup.BackendType.UNDEFINED",
    # Methods that torch calls on this backend by these names, and older names for code written
    # before 2.13.
    "torch._C._distributed_c10d.ProcessGroup._start_coalescing",
    "torch._C._distributed_c10d.ProcessGroup._end_coalescing",
    "torch._C._distributed_c10d.ProcessGroup._get_backend_name",
    "torch._C._distributed_c10d.ProcessGroup._set_sequence_number_for_group",
    "torch._C._distributed_c10d.ProcessGroup._get_sequence_number_for_group",
    "torch._C._distributed_c10d.ProcessGroup._allgather_base",
    "torch._C._distributed_c10d.ProcessGroup._reduce_scatter_base",
    "torch._C._distributed_c10d.ProcessGroupGloo._set_default_timeout",
    "torch._C._distributed_c10d.Work._source_rank",
    "torch._C._autograd._profiler_enabled",
    "torch.autograd.Variable._execution_engine",
    "torch._C._distributed_c10d._get_comm_profiling_name",
    "torch._C._profiler._RecordFunctionFast",
    "torch.autograd.profiler.profile._parse_kineto_results",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
    "torch._C._profiler.gather_traceback",
    "torch._C._profiler.symbolize_tracebacks",
    "torch.distributed.distributed_c10d._cleanup_process_group_global_state",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._register_pg_in_world",
    "torch.distributed.distributed_c10d._update_default_pg",
    "torch.distributed.distributed_c10d._register_process_group",
    "torch.distributed.distributed_c10d._unregister_process_group",
    "torch.distributed.distributed_c10d._world.pg_group_ranks",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._world.pg_names",
    "torch.distributed.distributed_c10d._world.pg_to_tag",
    "torch.distributed.distributed_c10d._world.tags_to_pg",
    "torch.distributed.distributed_c10d._world.pg_backend_config",
    "torch.distributed.distributed_c10d.BackendConfig",
    "torch._C._distributed_c10d.ProcessGroupGloo._Options._timeout",
    "torch._C._distributed_c10d.ProcessGroupGloo._Options.group_name",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch.Tensor._is_view",
    "torch.UntypedStorage._cdata",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
    "torch.nn.utils.parametrizations._SpectralNorm",
    "torch.utils._pytree.tree_map_only",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._record_post_forward",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    "torch._C._current_graph_task_id",
    "torch._C._storage_Use_Count",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_unflatten",
    # The base of torch's pipeline stages, and the names that `unisono.parallel` overrides or calls.
    "torch.distributed.pipelining.stage._PipelineStageBase",
    "torch.distributed.pipelining.stage._PipelineStageBase._create_grad_recv_info",
    "torch.distributed.pipelining.stage._PipelineStageBase._get_init_p2p_neighbors_ops",
    "torch.distributed.pipelining.stage._PipelineStageBase._prepare_backward_infra",
    "torch.distributed.pipelining.stage._PipelineStageBase._prepare_forward_infra",
)

WHERE_MISSING: Final[Mapping[str, str]] = {
    "torch._C._distributed_c10d.FakeProcessGroup.Options.error_on_collective": "torch 2.9: torch "
    "finds no backend for the CPU",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": "torch 2.9: the constructor",
    "torch._C._distributed_c10d._get_comm_profiling_name": "before 2.13: calls have no own names",
    "torch._C._distributed_c10d.ProcessGroup._set_sequence_number_for_group": "2.15: torch does "
    "not call it",
    "torch.distributed.distributed_c10d._cleanup_process_group_global_state": "torch 2.9: this "
    "file removes a group from torch's tables",
    "torch.distributed.distributed_c10d._register_pg_in_world": "before 2.13: this file adds a "
    "group to torch's tables",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "torch 2.9: meshes are not "
    "forgotten, so DTensors of an equal, later mesh may raise that its group was destroyed",
    "torch.autograd.profiler.profile._parse_kineto_results": "the stand-in for Gloo: its spans are "
    "not asynchronous in a profile",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "the stand-in for Gloo: "
    "nothing asks for these data",
    "torch.distributed.pipelining.stage._PipelineStageBase._get_init_p2p_neighbors_ops": "2.15: "
    "torch does not call it",
}
"""What happens, by private name, on the versions of torch that lack the name. All other names
exist from torch 2.9 on."""


is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Returns True if torch's profiler records this thread; takes 40 ns."""

_execution_engine: Any = torch.autograd.Variable._execution_engine


def run_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the backward pass under way, before `backward` returns."""
    _execution_engine.queue_callback(callback)


# Before torch 2.13 programs cannot name their calls.
_named_by_program: Callable[[], str] = getattr(_c10d, "_get_comm_profiling_name", str)

GROUP_METHODS: Final = frozenset((
    "_add_ephemeral_timeout", "_backend_id", "_has_hooks", "_id", "_pybind11_conduit_v1_",
    "_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name", "boxed",
    "rank", "size", "unbox",
))  # fmt: skip
"""Methods of torch's process group that work for every group, whatever its backends."""

BACKEND_METHODS: Final = frozenset((
    "_get_backend_name", "name", "rank", "size", "supports_tensor_alloc",
))  # fmt: skip
"""Methods of torch's backends that only answer a question."""

DTYPE_NAMES: Final = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
"""The C++ names of element types, which the flight recorder writes."""


def span(name: str, tensors: list[torch.Tensor], details: dict[str, Any]) -> Any:
    """Returns a context manager that adds a span to the profiler's trace, with shapes and details.

    `dist.record_comm` overrides the name.
    """
    return _profiler._RecordFunctionFast(_named_by_program() or name, tensors, details)


def current_stack() -> Any:
    """Returns the program's current stack, without symbols; takes 1 us."""
    return _profiler.gather_traceback(True, False, False)


def readable_stacks(stacks: list[Any]) -> list[list[dict[str, Any]]]:
    """Returns the function name, file and line of each frame of each stack, innermost frame
    first.
    """
    found: list[list[dict[str, Any]]] = _profiler.symbolize_tracebacks(stacks) if stacks else []
    return found


def register_group(group: Any, backend: str, config: str, global_ranks: list[int]) -> None:
    """Registers a group that torch did not make.

    `backend` is the name that the program asked for. `config` names a backend for each device.
    """
    ranks = {global_rank: rank for rank, global_rank in enumerate(global_ranks)}
    store, name = group.get_group_store(), group.group_name
    if hasattr(_torch_groups, "_register_pg_in_world"):
        _torch_groups._register_pg_in_world(
            group,
            backend_name=backend,
            store=store,
            group_name=name,
            backend_config=config,
            rank_mapping=ranks,
        )
        return
    world, tag = _torch_groups._world, f"ptd:{name}"
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = config
    world.pg_group_ranks[group] = ranks
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    _torch_groups._register_process_group(name, group)


def _forget_group(group: Any) -> None:
    """Undoes torch's registration of a group that it has just made."""
    world = _torch_groups._world
    world.tags_to_pg[""].remove(group)  # torch's function leaves it there
    if hasattr(_torch_groups, "_cleanup_process_group_global_state"):
        _torch_groups._cleanup_process_group_global_state(group)
        return
    for table in (world.pg_map, world.pg_backend_config, world.pg_group_ranks):
        table.pop(group, None)
    del world.tags_to_pg[world.pg_to_tag.pop(group)]
    _torch_groups._unregister_process_group(world.pg_names.pop(group))


def prefixed(store: Any, prefix: str) -> Any:
    """Returns a view of a store with `prefix` before each key (public, but not in torch's
    stubs).
    """
    return _c10d.PrefixStore(prefix, store)


def make_default(group: Any) -> None:
    """Makes a registered group the default group, if none exists."""
    _torch_groups._update_default_pg(group)


def groups_of_torch() -> list[Any]:
    """Returns all process groups of this process that are not destroyed."""
    return list(_torch_groups._world.pg_map)


_PLACEHOLDERS_RAISE: Final = hasattr(_c10d.FakeProcessGroup.Options, "error_on_collective")
_NO_DATA: Final = torch.device("meta")


def attach_placeholder(group: Any, rank: int, size: int) -> Any:
    """Attaches the C++ backend object that the C++ part of a Python process group needs.

    Torch stores the group's name and description in a C++ backend, and asks it for features. This
    placeholder transfers no data: collectives that reach it raise. In torch 2.9 they would return,
    so there it serves tensors without data, and torch's C++ code finds no backend for the CPU. The
    caller must keep the returned object.

    Its type is not CUSTOM: a group has only one backend of each type, and plug-ins for other
    devices have that type.
    """
    options = _c10d.FakeProcessGroup.Options()
    if _PLACEHOLDERS_RAISE:
        options.error_on_collective = True
    create = getattr(_c10d.FakeProcessGroup, "_create_internal", _c10d.FakeProcessGroup)
    placeholder: Any = create(rank, size, options)
    kind = dist.ProcessGroup.BackendType.UNDEFINED
    device = torch.device("cpu") if _PLACEHOLDERS_RAISE else _NO_DATA
    group._register_backend(device, kind, placeholder)
    group._set_default_backend(kind)
    return placeholder


def serve_device(group: Any, device: str, placeholder: Any) -> None:
    """Adds a group's placeholder for the tensors of another device."""
    if _PLACEHOLDERS_RAISE:
        kind = dist.ProcessGroup.BackendType.UNDEFINED
        group._register_backend(torch.device(device), kind, placeholder)


def device_types(group: Any) -> list[torch.device]:
    """Returns the devices for which a group has C++ backends, except for tensors without data."""
    found = ProcessGroupBase._device_types.__get__(group)
    return [device for device in found if device != _NO_DATA]


MAKING: Final = (
    "backend_config",
    "backend_options",
    "global_ranks_in_group",
    "group_desc",
    "group_name",
    "group_rank",
    "group_size",
    "pg",
    "store",
    "timeout",
)
"""Local variables of torch's function that makes groups. This module reads them."""

_make_group: Any = _torch_groups._new_process_group_helper


def group_being_made() -> dict[str, Any]:
    """Returns the `MAKING` variables of the group that torch is making; {} if torch is making none.

    Torch does not pass the group's other devices and their backends to a Python backend. So this
    reads them from the caller's local variables.
    """
    call = _call_under_way(_make_group)
    variables = call.f_locals if call else {}
    return {name: variables[name] for name in MAKING} if call else {}


def _call_under_way(function: Any) -> FrameType | None:
    """Returns the frame of the innermost active call of a function in this thread."""
    code = inspect.unwrap(function).__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def replace_function(name: str, replacement: Callable[[Any], Any]) -> None:
    """Replaces a function of torch.distributed by `replacement(function)`, once.

    Raises `AttributeError` if this torch has no such function.
    """
    original = getattr(_torch_groups, name)
    changed = _replace(_torch_groups, name, replacement)
    if getattr(dist, name, None) is original:
        setattr(dist, name, changed)


def replace_reading_of_profiles(replacement: Callable[[Any], Any]) -> None:
    """Replaces the method that makes the list of events of a profile, once, if it exists."""
    with contextlib.suppress(AttributeError):
        _replace(torch.autograd.profiler.profile, "_parse_kineto_results", replacement)


def replace_logging_data(replacement: Callable[[Any], Any]) -> None:
    """Replaces the method that returns what DDP says about itself, once, if it exists."""
    with contextlib.suppress(AttributeError):
        _replace(torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", replacement)


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Any:
    original = getattr(owner, name)
    if hasattr(original, _REPLACED):
        return original
    changed = replacement(original)
    setattr(changed, _REPLACED, True)
    setattr(owner, name, changed)
    return changed


_REPLACED: Final = "_replaced_by_unisono"


def backends_by_device(backend: str) -> dict[str, str]:
    """Returns torch's choice of a backend for each device, from the backend that a program names.
    Raises torch's `ValueError` for a list of backends that torch cannot parse.
    """
    return dict(_torch_groups.BackendConfig(dist.Backend(backend)).get_device_backend_map())


def rename_backend(group: Any, backend: str) -> None:
    """Makes torch report `backend` as the name that the program asked for."""
    world: Any = _torch_groups._world
    _, store = world.pg_map[group]
    world.pg_map[group] = (backend, store)
    config = _torch_groups.BackendConfig(dist.Backend(backend))
    world.pg_backend_config[group] = str(config)


def gloo_class() -> Any:
    """Returns torch's class of Gloo groups; None if torch was built without Gloo."""
    return getattr(_c10d, "ProcessGroupGloo", None)


def gloo_options(timeout: timedelta, name: str, global_ranks: list[int]) -> Any:
    """Returns the options of a Gloo group with this timeout, name and ranks."""
    options = gloo_class()._Options()
    options._timeout = timeout
    options.group_name = name
    options.global_ranks_in_group = global_ranks
    return options


def make_group(backends: dict[str, str], **arguments: Any) -> Any:
    """Makes a process group of torch's class with a backend for each device, without registering
    it.

    `arguments` are those of torch's function. Raises torch's errors, such as for a backend that
    this machine lacks.
    """
    backend = ",".join(f"{device}:{name}" for device, name in backends.items())
    group, _ = _make_group(backend=backend, **arguments)
    _forget_group(group)
    return group


def add_backends(group: Any, source: Any, backends: dict[str, str]) -> None:
    """Adds the backends of another group for these devices."""
    for device, name in backends.items():
        found = source._get_backend(torch.device(device))
        kind = dist.Backend.backend_type_map[name]
        group._register_backend(torch.device(device), kind, found)


def set_default_backend(group: Any, name: str) -> None:
    """Makes the backend `name` the default for calls without a device."""
    group._set_default_backend(dist.Backend.backend_type_map[name])


def coalesces(group: Any, device: torch.device) -> bool:
    """Returns True if a group's backend for a device can coalesce messages."""
    return bool(group._get_backend(device).supports_coalescing)


def batch_under_way() -> tuple[object, list[Any]] | None:
    """Returns the active call of `dist.batch_isend_irecv` and its operations, else None."""
    call = _call_under_way(dist.batch_isend_irecv)
    return None if call is None else (call, call.f_locals["p2p_op_list"])


def name_group(group: Any, name: str, description: str) -> None:
    """Sets a group's description and its name, by which compiled code finds it."""
    group._set_group_name(name)
    group._set_group_desc(description)


def hide_from_dynamo(*classes: type) -> None:
    """Prevents torch.compile from tracing the methods of `classes`.

    DDP's C++ reducer calls them while a compiled region runs. Traced, they fail because the process
    group is an opaque object. Marking the code objects takes no time and does not import
    torch._dynamo.
    """
    functions = [member for cls in classes for member in vars(cls).values()]
    for function in functions:
        if isinstance(function, FunctionType):
            _skip_frames_of(function)


def _skip_frames_of(function: FunctionType) -> None:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    # If torch lacks these names, the only effect is that dynamo fails to compile graphs that call
    # these methods.
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        for code in {function.__code__, inspect.unwrap(function).__code__}:
            eval_frame.set_code_exec_strategy(code, strategy)


def split_groups(module: Any) -> list[Any]:
    """Returns the groups of parameters that `fully_shard` splits for a module. A group has a list
    `fsdp_params`, and a method `post_backward` that sums the gradients of all ranks.
    """
    return list(module._get_fsdp_state()._fsdp_param_groups)


def forget_forward_passes(group: Any) -> None:
    """Makes the next backward pass gather the parameters of later forward passes only. `group`: a
    group of `split_groups`."""
    if hasattr(group.comm_ctx, "post_forward_order"):  # made by the first pass
        group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def whole_parameter(parameter: Any) -> Any:
    """Returns the gathered parameter of an entry of a group's `fsdp_params`; None before the first
    gather.
    """
    return getattr(parameter, "_unsharded_param", None)


def is_view(tensor: torch.Tensor) -> bool:
    """Returns True if autograd sees the tensor as a view of another tensor."""
    return bool(tensor._is_view())


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns a copy of nested tuples, lists and dicts, with the results of a function in place of
    tensors.
    """
    return _pytree.tree_map_only(torch.Tensor, function, value)


def gradient_hooks(parameter: Any) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Returns the hooks of `register_hook` and of `register_post_accumulate_grad_hook`."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


def with_gradient_hooks(parameters: Sequence[Any]) -> list[int]:
    """Returns the places of the parameters that have hooks for their gradients."""
    return [
        place
        for place, each in enumerate(parameters)
        if each._backward_hooks or each._post_accumulate_grad_hooks
    ]


def remove_gradient_hooks(parameter: Any) -> None:
    """Makes backward passes call no hooks of a parameter. The mappings of hooks stay as they are,
    and so do the handles that remove a hook from them.
    """
    parameter._backward_hooks = None
    # torch goes on calling the former hooks after None
    parameter._post_accumulate_grad_hooks = OrderedDict()


_MODULE_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def has_hooks(module: Any) -> bool:
    """Returns True if a module calls a hook in its forward or backward pass."""
    return any(getattr(module, name) for name in _MODULE_HOOKS)


def storage_number(tensor: torch.Tensor) -> int:
    """Returns a number that changes when a program assigns to the tensor's `data`, also if the
    tensor is a `DTensor`, whose storage has no memory.
    """
    found: int = tensor.untyped_storage()._cdata
    return found


def forget_meshes() -> None:
    """Clears torch's results for operations on DTensors. They refer to the first of several equal
    meshes, whose groups a program may have destroyed.
    """
    from torch.distributed.tensor import debug

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def version_of(tensor: torch.Tensor) -> int:
    """Returns a number that each operation that writes the tensor in place increases."""
    return 0 if tensor.is_inference() else tensor._version


def is_spectral_norm(module: Any) -> bool:
    """Returns True for the parametrization of `torch.nn.utils.parametrizations.spectral_norm`."""
    return isinstance(module, _parametrizations._SpectralNorm)


def pipeline_stage_base() -> Any:
    """Returns torch's base class of pipeline stages, which leaves messages to its subclasses."""
    from torch.distributed.pipelining import stage

    return stage._PipelineStageBase


def is_in_backward() -> bool:
    """Returns True if autograd runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_called_by(function: Any) -> bool:
    """Returns True if a call of a Python function is active in this thread."""
    return _call_under_way(function) is not None


def storage_uses(tensor: torch.Tensor) -> int:
    """Returns how many tensors and storages use a tensor's memory; 2 for the tensor alone."""
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found


def flatten(value: object) -> tuple[list[Any], object]:
    """Returns the leaves of nested tuples, lists and dicts, and their structure."""
    leaves, structure = _pytree.tree_flatten(value)
    return leaves, structure


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """Returns the value that `flatten` has taken apart."""
    return _pytree.tree_unflatten(leaves, structure)
