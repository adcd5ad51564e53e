"""Refusals of single ranks, which all ranks raise together."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.peer_device import Words

REFUSAL_WORDS: Final = 33
"""Length of an encoded refusal: the number of bytes of its text, and the text."""

_TEXT_BYTES = 8 * (REFUSAL_WORDS - 1)


def refusal_words(error: Exception | None) -> Words:
    """Returns the text of an error, or none, as `REFUSAL_WORDS` words."""
    words = np.zeros(REFUSAL_WORDS, np.int64)
    if error is not None:
        text = (str(error) or type(error).__name__).encode()[:_TEXT_BYTES]
        words[0] = len(text)
        words[1:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    return words


def require_none_refused(rows: Words, what: str) -> None:
    """Raises `UnsupportedError` with the first refusal among the words of all ranks, if any."""
    for rank, words in enumerate(rows):
        if length := int(words[0]):
            text = words[1:].view(np.uint8)[:length].tobytes().decode(errors="replace")
            raise UnsupportedError(f"{what}: rank {rank}: {text}")


def agree(comm: Any, error: Exception | None, what: str) -> None:
    """Raises `UnsupportedError` on all ranks if one of them has an error. Collective."""
    rows = comm.all_gather(refusal_words(error)).reshape(comm.size, REFUSAL_WORDS)
    require_none_refused(rows, what)
