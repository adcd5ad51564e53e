"""Selection of the algorithm for a call by rules, files and cost models, without communication.

A `Selection` is a tuple of rules. A `SelectionTable` combines several selections, in order of
precedence: argument, environment, file, built-in. If no rule matches a call, a cost model decides:
`predict` for one host, `predict_on` for several hosts.
"""

from unisono.selection.network_cost_model import Demands, candidates, predict_on
from unisono.selection.one_host_cost_model import predict
from unisono.selection.rules import IntRange, Measured, Rule, Selection
from unisono.selection.rules_file import load, save
from unisono.selection.selection_table import (
    Layer,
    Selectable,
    SelectedRule,
    SelectionTable,
    parse_algorithms,
)

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
