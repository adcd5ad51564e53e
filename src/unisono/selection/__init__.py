"""Selection: which algorithm serves a call, decided by rules, files and cost models. Pure.

A `Selection` is a tuple of rules. A `SelectionTable` stacks several by precedence: argument,
environment, file, built in. Where no rule serves a call, a cost model decides: `predict` for one
host, `predict_on` for several.
"""

from unisono.selection.host_cost_model import predict
from unisono.selection.network_cost_model import Demands, candidates, predict_on
from unisono.selection.precedence import (
    Layer,
    Selectable,
    SelectedRule,
    SelectionTable,
    parse_algorithms,
)
from unisono.selection.rules import IntRange, Measured, Rule, Selection
from unisono.selection.rules_file import load, save

__all__ = [
    "Demands",
    "IntRange",
    "Layer",
    "Measured",
    "Rule",
    "Selectable",
    "SelectedRule",
    "Selection",
    "SelectionTable",
    "candidates",
    "load",
    "parse_algorithms",
    "predict",
    "predict_on",
    "save",
]
