"""Errors of models that use divided parameters in a way that no rank can compute."""

from __future__ import annotations

from unisono.errors import MismatchError
from unisono.planner import Layout

_SPLIT = "mixed torch.Tensor and DTensor"  # in the message of torch's error


def divided_use_error(error: BaseException, layout: Layout) -> ValueError | None:
    """Returns an error that names the cause, if a step has failed because `fully_shard` splits the
    parameters of a model that cannot be split, or because ranks exchanged different arrays. Returns
    None for other causes.
    """
    found: BaseException | None = error
    while found is not None:
        if layout.zero >= 2 and _SPLIT in str(found):
            return ValueError(
                f"zero = {layout.zero} gathers the parameters of a module while its forward runs, "
                "but the model uses a parameter of a module that is not called at that time; call "
                "the module, or own the parameter in the module that uses it; zero = 1 works"
            )
        if isinstance(found, MismatchError):
            return ValueError(
                different_calls(layout.zero) if layout.zero >= 2 else _different_exchanges(found)
            )
        found = found.__cause__ or found.__context__
    return None


def _different_exchanges(error: MismatchError) -> str:
    return (
        f"the ranks exchanged different activations in this step ({error}); pass the same whole "
        "batch on every rank, call the same modules on all ranks in the same order, and do not go "
        "on after an exception that only one rank caught"
    )


def different_calls(zero: int) -> str:
    """Returns the message for ranks that call different modules."""
    return (
        f"zero = {zero} gathers the parameters of a module from all ranks of its group, but in this"
        " step the ranks called different modules, or in different orders, or one rank caught an "
        "exception and went on; call the same modules on all ranks; zero = 1 works"
    )
