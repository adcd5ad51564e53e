"""Parses topologies from short texts such as `torus:8x8`, `fat_tree:k=4` and `dgx/fat_tree:k=8`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unisono.topology import clos, clusters, dragonflies, lattice, servers
from unisono.topology.graph import LinkKind, Topology
from unisono.topology.wiring import Cable

_BOXES: dict[str, Callable[..., Topology]] = {"torus": lattice.torus, "grid": lattice.grid}
_BUILDERS: dict[str, Callable[..., Topology]] = {
    "ring": lattice.ring,
    "line": lattice.line,
    "mesh": lattice.mesh,
    "star": clos.star,
    **_BOXES,
    "hypercube": lattice.hypercube,
    "fat_tree": clos.fat_tree,
    "leaf_spine": clos.leaf_spine,
    "rails": clos.rails,
    "rail_optimised": clusters.rail_optimised,
    "dragonfly": dragonflies.dragonfly,
    "dragonfly_plus": dragonflies.dragonfly_plus,
    "nvswitch": servers.nvswitch,
    "pcie_server": servers.pcie_server,
    "dgx": servers.dgx,
}
EXAMPLES = (
    "ring:8", "line:8", "mesh:8", "star:8", "torus:4x4", "grid:4x4", "hypercube:3", "fat_tree:k=4",
    "leaf_spine:leaves=4,spines=2,hosts=4", "rail_optimised:hosts=4,gpus=8",
    "dragonfly:a=4,p=2,h=2", "dragonfly_plus:k=4", "nvswitch:8", "pcie_server", "dgx:8",
    "dgx:8/fat_tree:k=4",
)  # fmt: skip
"""One spec for each kind of network."""

_FIXED = ("far", "pcie", "server")
"""Parameters of the builder functions that a spec cannot set."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)(K|M|G|T)?(bit|B)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s)")
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse(text: str) -> Topology:
    """Builds the topology of a spec. A spec is a name, `:`, and sizes such as `4x4`, a number, or
    `option=value,...`.

    The name is a function of `unisono.topology`, and options are its parameters. Options of the
    links are `bandwidth=400Gbit` or `bandwidth=50GB` (per second and direction), `latency=500ns`,
    `kind=ethernet`. `server/network` means servers whose network cards are the endpoints of a
    network. Raises `ValueError` for an invalid spec.

    >>> parse("torus:4x4"), parse("dgx:8/fat_tree:k=8").num_ranks
    (<Topology torus:4x4: 16 ranks, 32 links>, 128)
    >>> parse("fat_tree:k=4,bandwidth=100Gbit").bisection_Bps()
    100000000000.0
    """
    server, slash, fabric = text.strip().partition("/")
    if slash:
        return clusters.cluster(_one(server), _one(fabric))
    return _one(server)


def names() -> tuple[str, ...]:
    """Returns the names of all kinds of topologies.

    >>> names()[:3]
    ('dgx', 'dragonfly', 'dragonfly_plus')
    """
    return tuple(sorted(_BUILDERS))


def vary(text: str, name: str, value: str) -> str:
    """Returns the spec with a new value of the option `name`. In `server/network`, the server's
    option is set only if the network has no such option.

    `name` is a parameter of the function that builds the network, or `bandwidth`, `latency` or
    `kind`. `radix` means `k` for networks of switches with k ports. Raises `ValueError` for an
    unknown option.

    >>> vary("fat_tree:8", "k", "4"), vary("dgx:8/fat_tree:k=8", "gpus", "4")
    ('fat_tree:k=4', 'dgx:gpus=4/fat_tree:k=8')
    >>> vary("torus:4x4,latency=1us", "sizes", "2x2")
    'torus:2x2,latency=1us'
    """
    server, slash, fabric = text.strip().partition("/")
    parts = [server, fabric] if slash else [server]
    for number in reversed(range(len(parts))):
        there = variable(parts[number])
        key = "k" if name == "radix" and "k" in there else name
        if key in there:
            parts[number] = _with(parts[number], key, value, there[0])
            return "/".join(parts)
    every = sorted({option for part in parts for option in variable(part)})
    raise ValueError(f"{text}: unknown option {name}; expected one of {', '.join(every)}")


def variable(text: str) -> tuple[str, ...]:
    """Returns the names of the options of a spec without `/`. Raises `ValueError` for an unknown
    kind of network.

    >>> variable("star:8")
    ('ranks', 'bandwidth', 'latency', 'kind', 'reduces')
    """
    name = text.strip().partition(":")[0]
    if name not in _BUILDERS:
        raise ValueError(f"unknown topology {name!r}; expected one of {', '.join(names())}")
    found: list[str] = []
    for key in inspect.signature(_BUILDERS[name]).parameters:
        found += ("bandwidth", "latency", "kind") if key == "cable" else (key,)
    return tuple(key for key in found if key not in _FIXED)


def _with(part: str, key: str, value: str, first: str) -> str:
    """Sets an option in a spec without `/`. `first` is the parameter whose value may be given
    without a name."""
    head, _, rest = part.partition(":")
    words = [word for word in rest.split(",") if word]
    kept = [word for word in words if (word.split("=")[0] if "=" in word else first) != key]
    bare = key == "sizes"  # sizes are given without a name, as in torus:4x4
    return f"{head}:{','.join([value, *kept] if bare else [*kept, f'{key}={value}'])}"


def _one(text: str) -> Topology:
    name, _, rest = text.strip().partition(":")
    builder = _BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"unknown topology {name!r}; expected one of {', '.join(names())}")
    words = [word for word in rest.split(",") if word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    plain = [word for word in words if "=" not in word]
    known = inspect.signature(builder).parameters
    arguments: list[Any] = [_size(name, word) for word in plain]
    if len(arguments) > 1:
        raise ValueError(
            f"{text}: expected at most one size without a name, such as {_example(name)}"
        )
    values = _options(name, options, known)
    try:
        inspect.signature(builder).bind(*arguments, **values)
    except TypeError as error:
        raise ValueError(f"{text}: {error}; an example: {_example(name)}") from error
    try:
        return builder(*arguments, **values)
    except MemoryError as error:
        raise ValueError(f"{text}: the network does not fit into memory") from error


def _size(name: str, word: str) -> int | list[int]:
    if not re.fullmatch(r"\d+(x\d+)*", word):
        raise ValueError(f"{name}: expected a size, got {word!r}; an example: {_example(name)}")
    sizes = [int(size) for size in word.split("x")]
    if name in _BOXES:
        return sizes
    if len(sizes) > 1:
        raise ValueError(f"{name}: expected one size, got {word}; an example: {_example(name)}")
    return sizes[0]


def _options(name: str, options: dict[str, str], known: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    cable: dict[str, Any] = {}
    for key, text in options.items():
        if key == "bandwidth":
            cable["bandwidth_Bps"] = rate(text)
        elif key == "latency":
            cable["latency_s"] = seconds(text)
        elif key == "kind":
            cable["kind"] = _kind(text)
        elif key in known and key not in (*_FIXED, "cable", "sizes"):
            values[key] = _value(name, key, text)
        else:
            raise ValueError(f"{name}: unknown option {key}; an example: {_example(name)}")
    if cable:
        default = known["cable"].default
        assert isinstance(default, Cable), "every builder has a default cable"
        values["cable"] = replace(default, **cable)
    return values


def _value(name: str, key: str, text: str) -> int | float | bool | str:
    if key == "routing":
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if key == "oversubscription" else int(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {key}={text}") from None


def rate(text: str) -> float:
    """Parses bytes per second from texts such as `400Gbit` and `50GB`, with powers of ten. Raises
    `ValueError`.

    >>> rate("400Gbit"), rate("50GB")
    (50000000000.0, 50000000000.0)
    """
    match = _RATE.fullmatch(text.removesuffix("/s"))
    if match is None:
        raise ValueError(f"expected a rate such as 400Gbit or 50GB, got {text!r}")
    number, unit, what = match.groups()
    return float(number) * _UNITS[(unit or "").upper()] / (1 if what == "B" else 8)


def seconds(text: str) -> float:
    """Parses a time such as `500ns`, `1.5us`, `10ms`. Raises `ValueError`.

    >>> round(seconds("1.5us") * 1e9)
    1500
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a time such as 500ns or 1.5us, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def _kind(text: str) -> LinkKind:
    try:
        return LinkKind[text.upper()]
    except KeyError:
        kinds = ", ".join(kind.name.lower() for kind in LinkKind)
        raise ValueError(f"unknown kind of link {text}; expected one of {kinds}") from None


def _example(name: str) -> str:
    return next((spec for spec in EXAMPLES if spec.split(":")[0] == name), name)
