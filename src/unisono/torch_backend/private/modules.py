"""Modules: their hooks, their division by `fully_shard`, and torch's pipeline stages."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.modules import dropout
from torch.nn.utils import parametrizations

# Typed as Any: the stubs lack the classes.
_dropout: Any = dropout
_parametrizations: Any = parametrizations

_SUMS: Final = "unsharded_accumulated_grad"
_MODULE_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def has_hooks(module: Any) -> bool:
    """Returns True if a module calls a hook in its forward or backward pass."""
    return any(getattr(module, name) for name in _MODULE_HOOKS)


def hooks_before(module: Any) -> list[Any]:
    """Returns the hooks that a module calls before its forward pass."""
    return list(module._forward_pre_hooks.values())


def own_parameters(module: Any) -> dict[str, Any]:
    """Returns the table in which a module keeps its own parameters by name; some may be None."""
    found: dict[str, Any] = module._parameters
    return found


def use_present_weights(module: Any) -> None:
    """Makes a recurrent module use its present parameters, which it also keeps in a list."""
    if isinstance(module, torch.nn.RNNBase):
        own = module._parameters
        module._flat_weights = [own.get(name) for name in module._flat_weights_names]


def reset_of(module: Any) -> Any:
    """Returns the method by which a module draws its own parameters; None if it has none."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def own_buffers(module: Any) -> dict[str, Any]:
    """Returns the table in which a module keeps its own buffers by name; some may be None."""
    found: dict[str, Any] = module._buffers
    return found


def own_children(module: Any) -> dict[str, Any]:
    """Returns the table in which a module keeps its children by name; some may be None.

    Unlike `named_children`, it has repeated modules under each of their names.
    """
    found: dict[str, Any] = module._modules
    return found


def drop_probability(module: Any) -> float:
    """Returns the probability of torch's dropout modules; 0 for other modules."""
    return module.p if isinstance(module, _dropout._DropoutNd) else 0.0


def is_spectral_norm(module: Any) -> bool:
    """Returns True for the parametrization of `torch.nn.utils.parametrizations.spectral_norm`."""
    return isinstance(module, _parametrizations._SpectralNorm)


def pipeline_stage_base() -> Any:
    """Returns torch's base class of pipeline stages, which leaves messages to its subclasses."""
    from torch.distributed.pipelining import stage

    return stage._PipelineStageBase


def is_type_check(operation: Any) -> bool:
    """Returns True for the operation by which a traced conversion checks the type of its input."""
    return operation is torch.ops.aten._assert_tensor_metadata.default


def skip_message_setup(schedule: Any) -> None:
    """Keeps a pipeline schedule from a collective before its first pass, by which torch 2.15 makes
    connections. Earlier versions do not read the attribute.
    """
    schedule._p2p_initialized = True


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


def even_out_gradients(group: Any) -> None:
    """Gives the gathered parameters of a group gradients of one type, before they are summed.

    Several microbatches add gradients up in the type of the sums. A parameter that no microbatch
    used, or only the last one, has none of this type, and torch refuses a mixture. Since torch
    2.15, the gradient of the gathered parameter itself adds them up.
    """
    if any(isinstance(getattr(type(each), _SUMS, None), property) for each in group.fsdp_params):
        return
    found = [each.unsharded_accumulated_grad for each in group.fsdp_params]
    dtype = next((each.dtype for each in found if each is not None), None)
    for each in group.fsdp_params if dtype is not None else ():
        whole = whole_parameter(each)
        if each.unsharded_accumulated_grad is None and whole is not None and whole.requires_grad:
            gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
            each.unsharded_accumulated_grad, whole.grad = gradient.to(dtype), None


def forget_meshes() -> None:
    """Clears torch's results for operations on DTensors. They refer to the first of several equal
    meshes, whose groups a program may have destroyed.
    """
    from torch.distributed.tensor import debug

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
