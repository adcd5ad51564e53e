"""Methods that torch.compile does not trace."""

from __future__ import annotations

import contextlib
import inspect
from types import FunctionType


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
