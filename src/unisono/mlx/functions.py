"""MLX's functions that this package replaces."""

from __future__ import annotations

import contextlib
from typing import Any

from unisono.errors import UnsupportedError


class Functions:
    """Replaces functions of the module `mlx.core`."""

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._synchronize, self._new_stream = mx.synchronize, mx.new_stream
        self._init = mx.distributed.init
        self._streams: list[Any] = [mx.default_stream(mx.cpu)]
        mx.synchronize, mx.new_stream = self.synchronize, self.new_stream
        mx.distributed.init = self.init

    def synchronize(self, stream: Any = None) -> None:
        """Waits for a stream without the GIL. MLX's own function holds it, and a new collective
        needs it."""
        self._mx.eval(self._mx.zeros(1, stream=stream) + 0)
        self._synchronize(stream)

    def new_stream(self, device: Any) -> Any:
        """Makes a stream, and remembers it."""
        stream = self._new_stream(device)
        self._streams.append(stream)
        return stream

    def init(self, strict: bool = False, backend: str = "any", **options: Any) -> Any:
        """Returns the group of all processes on Unisono. Refuses MLX's other backends, whose
        variables are gone, so that each process would be alone."""
        if backend not in ("any", "mpi"):
            raise UnsupportedError(
                f"backend {backend!r}: unisono.mlx is imported, so the backend is 'mpi' (or 'any')"
            )
        return self._init(strict=strict, backend="mpi", **options)

    def finish(self) -> None:
        """Waits for all streams that can have collectives."""
        for stream in self._streams:
            with contextlib.suppress(RuntimeError):  # the stream belongs to another thread
                self.synchronize(stream)
