"""Refusals: a rank that refuses its arguments tells the other ranks, so that they do not wait for
it.
"""

from __future__ import annotations

import functools
from typing import Any


def reports_refusals(method: Any) -> Any:
    """Decorates a collective of the process group to report refused arguments to all ranks.

    Often only one rank sees wrong lengths, for example because its last batch is smaller. The
    communicator reports its own refusals; this decorator reports errors that are found earlier. If
    all ranks refuse the call, the group stays usable. Otherwise the ranks that make the call raise
    `MismatchError` with this rank's reason.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except (ValueError, TypeError) as error:
            self.communicator.refuse(method.__name__, error)
            raise

    return call
