"""Registry of algorithms by operation, with their parameters and costs.

A new algorithm is one decorated function in a file of this package:

    @algorithm(Op.ALL_GATHER, "name", cost=_cost)
    def all_gather(ranks: int, *, k: int = 2) -> Schedule: ...

`cost` is a function that takes the same arguments, except the root. Keyword-only arguments are the
parameters in the algorithm's string (see `parameters`).

Every algorithm accepts two further parameters. `channels=k` cuts the vector into k shares that
travel at the same time, each in its own channel. `block_bytes=b` sets the block size of the
executor and does not change the schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from unisono.algorithms import algorithm_spec, schedule_composition
from unisono.algorithms.cost import FREE, Cost
from unisono.algorithms.host_layout import Hosts
from unisono.errors import UnsupportedError
from unisono.schedule import MAX_RANKS, Schedule
from unisono.types import Op

F = TypeVar("F", bound=Callable[..., Schedule])

_CHANNELS = "channels"
_BLOCK_BYTES = "block_bytes"
_UNIVERSAL = (_CHANNELS, _BLOCK_BYTES)
_READERS: Mapping[Any, Callable[[str, str], Any]] = {
    int: algorithm_spec.number,
    int | None: algorithm_spec.number,
    algorithm_spec.Dims | None: algorithm_spec.dims,
    str: lambda _, text: text,
    str | None: lambda _, text: text,
}
_LEVELS = tuple[algorithm_spec.Level, ...]
_HOSTS = "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One keyword-only argument of an algorithm's function."""

    name: str
    type: Any
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm of one operation.

    `exact` is true if `cost`, for the default parameters, equals the cost of the schedule.
    Otherwise the bytes and reductions of `cost` are upper bounds. `knows_hosts` is true if
    `function` and `cost` accept the hosts of the ranks. The docstring of `function` states rounds,
    bytes and source.
    """

    op: Op
    name: str
    function: Callable[..., Schedule]
    cost: Callable[..., Cost]
    exact: bool
    knows_hosts: bool
    parameters: tuple[Parameter, ...]

    @property
    def for_hosts(self) -> bool:
        """True if the algorithm is only for ranks on several hosts."""
        return self.knows_hosts and "levels" not in {p.name for p in self.parameters}

    @property
    def doc(self) -> str:
        """Docstring of `function`: a summary, the cost in words, and the source."""
        return inspect.getdoc(self.function) or ""


_ALGORITHMS: dict[tuple[Op, str], Algorithm] = {}


def algorithm(
    op: Op, name: str, *, cost: Callable[..., Cost], exact: bool = True
) -> Callable[[F], F]:
    """Returns a decorator that registers an algorithm. The decorated function takes the number of
    ranks, and the root if the operation has a root.
    """

    def register(function: F) -> F:
        signature = inspect.signature(function, eval_str=True).parameters
        parameters = tuple(
            Parameter(name=p.name, type=p.annotation, default=p.default)
            for p in signature.values()
            if p.kind is p.KEYWORD_ONLY and p.name != _HOSTS
        )
        for parameter in parameters:
            assert parameter.type in _READERS or parameter.type == _LEVELS, parameter
        _ALGORITHMS[op, name] = Algorithm(
            op=op,
            name=name,
            function=function,
            cost=cost,
            exact=exact,
            knows_hosts=_HOSTS in signature,
            parameters=parameters,
        )
        return function

    return register


def names(op: Op | str) -> tuple[str, ...]:
    """Returns the names of an operation's algorithms, without parameters, in alphabetical order.

    >>> import unisono.algorithms
    >>> "one_shot" in unisono.algorithms.names("all_reduce")
    True
    """
    op = _operation(op)
    return tuple(sorted(name for served, name in _ALGORITHMS if served is op))


def find(op: Op | str, name: str) -> Algorithm:
    """Returns the algorithm that a string names. Parameters in the string are ignored.

    >>> import unisono.algorithms
    >>> [p.name for p in unisono.algorithms.find("broadcast", "k_nomial:4").parameters]
    ['k']
    """
    op = _operation(op)
    return _find(op, algorithm_spec.parse(op, name).name)


def build(
    op: Op | str,
    name: str,
    *,
    ranks: int,
    root: int = 0,
    levels: algorithm_spec.Dims | None = None,
    hosts: Hosts | None = None,
) -> Schedule:
    """Builds the schedule of the algorithm that the string `name` describes. The module
    `parameters` explains the string.

    - `root` is for operations that have a root.
    - `levels` are the sizes of the levels or the dims of a grid, innermost first (ranks of a host,
      then hosts). `levels` apply to strings that need sizes but omit the sizes.
    - `hosts` are the ranks of each host, for algorithms that minimise the traffic between hosts.
      Any partition of the ranks is allowed. By default, hosts have consecutive ranks.

    By default, levels and hosts have sizes as equal as the number of ranks allows.

    Raises `UnsupportedError` for an unknown operation or algorithm, invalid parameters, or an
    unsupported number of ranks.

    >>> import unisono.algorithms
    >>> unisono.algorithms.build("all_reduce", "one_shot", ranks=4).num_rounds
    1
    >>> unisono.algorithms.build("all_gather", "level0:mesh@4;level1:ring@2", ranks=8).num_rounds
    2
    >>> unisono.algorithms.build("broadcast", "leaders", ranks=3, hosts=((0, 2), (1,))).num_rounds
    2
    """
    op = _operation(op)
    found, arguments = _resolve(op, name, ranks, levels, hosts)
    channels = arguments.pop(_CHANNELS, 1)
    arguments.pop(_BLOCK_BYTES, None)
    if op.rooted:
        arguments["root"] = _root(op, root, ranks)
    schedule = found.function(ranks=ranks, **arguments)
    if channels > 1:
        schedule = schedule_composition.in_channels([schedule] * channels)
    return replace(schedule, algorithm=name)


def cost(
    op: Op | str,
    name: str,
    *,
    ranks: int,
    levels: algorithm_spec.Dims | None = None,
    hosts: Hosts | None = None,
) -> Cost:
    """Returns the cost of an algorithm from a formula, without building the schedule. `build`
    explains the arguments.

    >>> import unisono.algorithms
    >>> unisono.algorithms.cost("all_reduce", "ring", ranks=4).bytes_sent
    Fraction(3, 2)
    """
    op = _operation(op)
    found, arguments = _resolve(op, name, ranks, levels, hosts)
    for key in _UNIVERSAL:
        arguments.pop(key, None)
    return found.cost(ranks=ranks, **arguments) if ranks > 1 else FREE


def block_bytes(op: Op | str, name: str) -> int | None:
    """Returns the executor's block size in bytes if the algorithm's string sets it, else None.

    >>> block_bytes("all_reduce", "direct:block_bytes=65536")
    65536
    """
    found = dict(algorithm_spec.parse(_operation(op), name).named).get(_BLOCK_BYTES)
    return None if found is None else algorithm_spec.number(f"{name}: {_BLOCK_BYTES}", found)


def _resolve(
    op: Op, name: str, ranks: int, levels: algorithm_spec.Dims | None, hosts: Hosts | None
) -> tuple[Algorithm, dict[str, Any]]:
    """Returns the algorithm and its arguments, except the ranks and the root."""
    if not 1 <= ranks <= MAX_RANKS:
        raise UnsupportedError(f"{op}: expected 1..{MAX_RANKS} ranks, got {ranks}")
    parsed = algorithm_spec.parse(op, name)
    found = _find(op, parsed.name)
    known = {parameter.name: parameter.type for parameter in found.parameters}
    texts = dict(parsed.named)
    if len(parsed.positional) > len(known):
        raise UnsupportedError(f"{name!r}: {_usage(found)}")
    for parameter, text in zip(found.parameters, parsed.positional, strict=False):
        if parameter.name in texts:
            raise UnsupportedError(f"{name!r}: expected {parameter.name} once, got it twice")
        texts[parameter.name] = text
    arguments: dict[str, Any] = {}
    for key, text in texts.items():
        reader = _READERS.get(int if key in _UNIVERSAL else known.get(key))
        if reader is None:
            raise UnsupportedError(f"{name!r}: {_usage(found)}")
        arguments[key] = reader(f"{parsed.name}: {key}", text)
    if parsed.levels:
        arguments["levels"] = parsed.levels
    if levels is not None and "dims" in known and "dims" not in arguments:
        arguments["dims"] = levels
    if hosts is not None and found.knows_hosts:
        arguments[_HOSTS] = hosts
    return found, arguments


def _root(op: Op, root: int, ranks: int) -> int:
    if not 0 <= root < ranks:
        raise UnsupportedError(f"{op}: expected a root in 0..{ranks - 1}, got {root}")
    return root


def _find(op: Op, name: str) -> Algorithm:
    if (op, name) not in _ALGORITHMS:
        raise UnsupportedError(
            f"{op} has no algorithm {name!r}; expected one of {', '.join(names(op))}"
        )
    return _ALGORITHMS[op, name]


def _usage(found: Algorithm) -> str:
    words = [f"{p.name}={p.default}" for p in found.parameters if p.type in _READERS]
    return f"the parameters of {found.name} are {', '.join([*words, _CHANNELS + '=1'])}"


def _operation(op: Op | str) -> Op:
    try:
        return Op(op)
    except ValueError:
        raise UnsupportedError(
            f"unknown operation {op!r}; expected one of {', '.join(Op)}"
        ) from None
