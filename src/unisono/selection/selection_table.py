"""The selection table of a group: selections in order of precedence, each with its source.

The whole group uses rank 0's table, which the other ranks receive at bootstrap. So all ranks choose
the same algorithm, whatever their own arguments, environments, files and cores.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from unisono.algorithms import Hosts
from unisono.errors import UnsupportedError
from unisono.selection import rules_file
from unisono.selection.network_cost_model import ANYTHING, Demands, fastest_between
from unisono.selection.one_host_cost_model import Fastest, fastest
from unisono.selection.rules import ANY, BUILT_IN, IntRange, Rule, Selection
from unisono.types import Op

Selectable: TypeAlias = Selection | str | os.PathLike[str]
"""A selection, or the path of its file."""

BUILT_IN_SOURCE = "built-in"
MODEL_SOURCE = "cost model"
_PREDICTION_LOCK = threading.RLock()
"""Serialises predictions. So ranks that are threads of one process compute each prediction only
once."""
os.register_at_fork(  # so that a forked child does not inherit a lock that no thread releases
    before=_PREDICTION_LOCK.acquire,
    after_in_parent=_PREDICTION_LOCK.release,
    after_in_child=_PREDICTION_LOCK.release,
)
_PAIR = re.compile(rf";\s*(?=(?:{'|'.join(Op)})\s*=)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A selection, and a text that says where it comes from."""

    source: str
    selection: Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedRule:
    """The rule that a call uses, and a text that says where it comes from."""

    rule: Rule
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTable:
    """Selections in order of precedence, and the number of cores that the group's ranks share.

    The built-in rules apply after these selections, and the cost model after the built-in rules.

    >>> SelectionTable(cores=2).choose(Op.ALL_REDUCE, 1024, ranks=4).rule.algorithm
    'one_shot'
    """

    layers: tuple[Layer, ...] = ()
    cores: int

    def choose(
        self,
        op: Op,
        nbytes: int,
        *,
        ranks: int,
        hosts: Hosts | None = None,
        dtype_bytes: int | None = None,
        demands: Demands = ANYTHING,
    ) -> SelectedRule:
        """Returns the rule for a call. `nbytes` is the size of the larger of the caller's input and
        output.

        `hosts` are the ranks of each host, or None for a single host. The cost model also respects
        `demands`.
        """
        count = 1 if hosts is None else len(hosts)
        built_in = Layer(source=BUILT_IN_SOURCE, selection=BUILT_IN)
        for layer in (*self.layers, built_in):
            rule = layer.selection.choose(
                op, nbytes, ranks=ranks, hosts=count, dtype_bytes=dtype_bytes
            )
            if rule is not None:
                return SelectedRule(rule=rule, source=layer.source)
        if hosts is None or count == 1:
            selection = modelled(op, ranks, self.cores)
        else:
            with _PREDICTION_LOCK:
                selection = modelled_between(op, hosts, self.cores, demands)
        rule = selection.choose(op, nbytes, ranks=ranks, hosts=count)
        assert rule is not None, "the cost model has a rule for every size"
        return SelectedRule(rule=rule, source=MODEL_SOURCE)

    def times_s(self, op: Op, nbytes: int, ranks: int) -> dict[str, float]:
        """Returns the measured seconds of each algorithm, from the first selection that has
        measurements for this call.
        """
        found = (layer.selection.times_s(op, nbytes, ranks) for layer in self.layers)
        return next((times_s for times_s in found if times_s), {})

    def under(self, selection: Selectable | None) -> SelectionTable:
        """Returns the table with `selection` before all other selections; None adds nothing. Raises
        `UnsupportedError` for an invalid file.
        """
        if selection is None:
            return self
        return SelectionTable(layers=(_argument(selection), *self.layers), cores=self.cores)

    def pack(self) -> bytes:
        """Serialises the table for other ranks."""
        layers = [[layer.source, rules_file.to_json(layer.selection)] for layer in self.layers]
        return json.dumps({"cores": self.cores, "layers": layers}).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> SelectionTable:
        """Deserialises a table from the result of `pack`.

        >>> SelectionTable.unpack(SelectionTable(cores=2).pack()) == SelectionTable(cores=2)
        True
        """
        found = json.loads(packed)
        return cls(
            layers=tuple(
                Layer(source=source, selection=rules_file.from_json(text, source))
                for source, text in found["layers"]
            ),
            cores=found["cores"],
        )


@cache
def modelled(op: Op, ranks: int, cores: int) -> Selection:
    """Returns the cost model's choices as a selection with one rule for each range of sizes.

    >>> print(modelled(Op.BROADCAST, 16, 2).rules[0])
    broadcast, 16 ranks: direct
    """
    reason = "lowest predicted time, from rounds, bytes and reductions"
    return _by_size(op, fastest(op, ranks=ranks, cores=cores), reason, ranks=ranks)


@cache
def modelled_between(op: Op, hosts: Hosts, cores: int, demands: Demands = ANYTHING) -> Selection:
    """Returns the cost model's choices for several hosts, with one rule for each range of sizes.

    >>> hosts = ((0,), (1,), (2,), (3,))
    >>> [rule.algorithm for rule in modelled_between(Op.ALL_REDUCE, hosts, 2).rules]
    ['leaders', 'by_host', 'by_host:ring']
    """
    reason = "lowest predicted time, from traffic between hosts and work inside them"
    parts = fastest_between(op, hosts=hosts, cores=cores, demands=demands)
    return _by_size(op, parts, reason, ranks=sum(map(len, hosts)), hosts=len(hosts))


def _by_size(
    op: Op, parts: Sequence[Fastest], reason: str, *, ranks: int, hosts: int | None = None
) -> Selection:
    ends = [part.least - 1 for part in parts[1:]]
    return Selection(
        rules=tuple(
            Rule(
                op=op,
                algorithm=part.algorithm,
                nbytes=IntRange(part.least, most),
                ranks=IntRange(ranks, ranks),
                hosts=ANY if hosts is None else IntRange(hosts, hosts),
                reason=reason,
            )
            for part, most in zip(parts, [*ends, None], strict=True)
        )
    )


def parse_algorithms(text: str) -> tuple[Rule, ...]:
    """Parses rules from a text such as "all_reduce=ring;broadcast=chain". Raises
    `UnsupportedError`.

    A semicolon begins another rule only if an operation follows. So an algorithm may contain
    semicolons between its levels.

    >>> [r.algorithm for r in parse_algorithms("all_reduce=level0:mesh;level1:ring;scan=chain")]
    ['level0:mesh;level1:ring', 'chain']
    """
    rules = []
    for part in _PAIR.split(text.strip().rstrip(";")):
        op, equals, algorithm = part.partition("=")
        if not equals or op.strip() not in list(Op):
            raise UnsupportedError(
                f"UNISONO_ALGORITHM: expected OPERATION=ALGORITHM, separated by semicolons, got "
                f"{part!r}; the operations are {', '.join(Op)}"
            )
        try:
            rules.append(Rule(op=Op(op.strip()), algorithm=algorithm.strip()))
        except UnsupportedError as error:
            raise UnsupportedError(f"UNISONO_ALGORITHM: {error}") from None
    return tuple(rules)


def _argument(selection: Selectable) -> Layer:
    if isinstance(selection, Selection):
        return Layer(source="argument", selection=selection)
    if not isinstance(selection, (str, os.PathLike)):
        raise TypeError(f"selection: expected a Selection or a file name, got {selection!r}")
    source = f"argument, {os.fspath(selection)}"
    return Layer(source=source, selection=rules_file.load(selection))
