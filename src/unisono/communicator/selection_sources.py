"""The selection rules of this rank, from its argument, environment and files."""

from __future__ import annotations

import logging
import os

from unisono.config import Settings
from unisono.errors import UnsupportedError
from unisono.selection import Layer, Selectable, Selection, SelectionTable, load, parse_algorithms

_log = logging.getLogger("unisono")


def own_table(settings: Settings, selection: Selectable | None, cores: int) -> SelectionTable:
    """Returns this rank's selection table.

    The order of priority is: the argument, UNISONO_ALGORITHM, then the file of UNISONO_SELECTION
    or, without it, the file that `unisono tune` made for this machine.

    Raises `UnsupportedError` if one of these is wrong. A wrong file of `unisono tune` only causes a
    warning, since the user did not ask for it.
    """
    layers = []
    if settings.algorithm:
        rules = parse_algorithms(settings.algorithm)
        layers.append(Layer(source="UNISONO_ALGORITHM", selection=Selection(rules=rules)))
    if settings.selection:
        source = f"UNISONO_SELECTION, {settings.selection}"
        layers.append(Layer(source=source, selection=load(settings.selection)))
    elif settings.tuned and os.path.exists(settings.tuned):
        try:
            tuned = load(settings.tuned)
            layers.append(Layer(source=f"tuned file, {settings.tuned}", selection=tuned))
        except UnsupportedError as error:
            _log.warning("ignored the tuned selection; run `unisono tune` to replace it: %s", error)
    return SelectionTable(layers=tuple(layers), cores=cores).under(selection)
