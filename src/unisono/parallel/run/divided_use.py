"""Errors of models that use divided parameters in a way that no rank can compute."""

from __future__ import annotations

from unisono.errors import MismatchError
from unisono.parallel.run.error_causes import with_causes
from unisono.planner import Layout

_SPLIT = "mixed torch.Tensor and DTensor"  # in the message of torch's error
_CHANGED = "of RegisterPostBackwardFunction is a view"


def divided_use_error(error: BaseException, layout: Layout) -> ValueError | None:
    """Returns an error that names the cause, if a step has failed because `fully_shard` splits the
    parameters of a model that cannot be split, or because ranks exchanged different arrays. Returns
    None for other causes.
    """
    for found in with_causes(error):
        if (layout.zero >= 2 or layout.ep > 1) and _SPLIT in str(found):
            return ValueError(
                f"zero = {layout.zero} gathers the parameters of a module while its forward runs, "
                "but the model uses a parameter of a module that is not called at that time; call "
                "the module, or own the parameter in the module that uses it; zero = 1 works"
            )
        if _CHANGED in str(found):
            return ValueError(
                f"zero = {layout.zero} gathers the parameters of a module whose forward changes its"
                " input in place, which torch does not allow; change a copy (inplace=False, x = x +"
                " y instead of x += y); zero = 1 works"
            )
        if isinstance(found, MismatchError):
            is_gathered = layout.zero >= 2 or layout.ep > 1
            return ValueError(
                different_calls(layout) if is_gathered else _different_exchanges(found)
            )
    return None


def _different_exchanges(error: MismatchError) -> str:
    return (
        f"the ranks exchanged different activations in this step ({error}); pass the same whole "
        "batch on every rank, call the same modules on all ranks in the same order, and do not go "
        "on after an exception that only one rank caught"
    )


def different_calls(layout: Layout) -> str:
    """Returns the message for ranks that call different modules."""
    if layout.ep > 1:
        return (
            f"ep = {layout.ep} exchanges the tokens of experts between ranks, but in this step the "
            "ranks called different modules, or one of them left the step; call the layers of "
            "experts on all ranks, also without tokens for them; ep = 1 with zero = 1 works"
        )
    return (
        f"zero = {layout.zero} gathers the parameters of a module from all ranks of its group, but "
        "in this step the ranks called different modules, or in different orders, or one of them "
        "left the step with an error of its own; call the same modules on all ranks; zero = 1 works"
    )
