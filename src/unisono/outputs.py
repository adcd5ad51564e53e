"""Files that commands write: refused before the work that fills them, not after it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TypeVar

import typer

STDOUT = "-"

_Output = TypeVar("_Output", Path, str, None)


def writable(path: _Output) -> _Output:
    """The callback of an option for a file to write. Makes missing folders; a file that cannot be
    written is a usage error that says why.

    >>> writable("-")
    '-'
    """
    if path is None or str(path) == STDOUT:
        return path
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    return path
