"""Reads text files that users name. Every error message contains the file's path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.errors import UnisonoError


@contextmanager
def reading(path: Path) -> Iterator[str]:
    """Yields the text of a file. If the file cannot be read, or the `with` block cannot parse the
    text, raises `ValueError`.

    >>> with reading(Path("/")) as text:
    ...     print(text)
    Traceback (most recent call last):
    ValueError: /: cannot be read: Is a directory
    """
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: cannot be read: not text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deep") from None
    except (ValueError, UnisonoError) as error:
        raise ValueError(f"{path}: {error}") from error
