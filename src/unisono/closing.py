"""The base of classes whose objects a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Calls `close` at the end of a `with` block, with or without an error."""

    @abstractmethod
    def close(self) -> None:
        """Ends what the object holds. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()
