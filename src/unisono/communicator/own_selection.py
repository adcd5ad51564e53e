"""The rules of selection that this rank brings: from its argument, its environment and files."""

from __future__ import annotations

import logging
import os

from unisono.config import Settings
from unisono.errors import UnsupportedError
from unisono.selection import Layer, Selectable, Selection, SelectionTable, load, parse_algorithms

_log = logging.getLogger("unisono")


def own_table(settings: Settings, selection: Selectable | None, cores: int) -> SelectionTable:
    """This rank's table: the argument, then UNISONO_ALGORITHM, then the file of
    UNISONO_SELECTION, else the file that `unisono tune` made for this machine.

    Raises `UnsupportedError` for what is wrong with any of them but the last: that one is only
    warned of, for nobody asked for it.
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
            _log.warning("ignored the tuned selection, make it anew by `unisono tune`: %s", error)
    return SelectionTable(layers=tuple(layers), cores=cores).under(selection)
