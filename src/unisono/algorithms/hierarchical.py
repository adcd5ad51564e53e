"""Hierarchical algorithms, which use a separate algorithm at each level: inside hosts, between
hosts, and so on.

The algorithm's string is, for example, `level0:mesh@4;level1:ring@2`, innermost level first (HCCL's
syntax, with sizes), or `hierarchical:4x2` for `direct` on each level. One level may omit its size.
If all levels omit their sizes, the argument `levels` of `build` gives the sizes, or else the
argument `hosts`. Without these arguments, the sizes are as equal as possible. If the sizes match
the hosts, each innermost group has the ranks of one host. Otherwise the ranks of a group are
consecutive. Only all-reduce supports hosts with different numbers of ranks (see `by_host`).

n is the number of ranks, and N is the size of the whole vector in bytes. In the docstrings below,
"Bytes" is the number of bytes that the busiest rank sends. A cost is the sum of the costs of the
levels, each for its share of the vector. The sum is an upper bound if the busiest ranks of the
levels differ.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import lcm, prod

from unisono.algorithms import operation_sequences
from unisono.algorithms.algorithm_spec import Dims, Level, parse
from unisono.algorithms.cost import BY_PART, FREE, Cost
from unisono.algorithms.grid import Grid, Lines, exchange
from unisono.algorithms.host_layout import HostLayout, Hosts
from unisono.algorithms.levels import Hierarchy, follows_hosts
from unisono.algorithms.registry import Algorithm, algorithm, find, names
from unisono.algorithms.schedule_composition import Composer
from unisono.schedule import Collective, Schedule
from unisono.types import Op

Levels = tuple[Level, ...]


def _all_reduce_cost(
    ranks: int, *, dims: Dims | None = None, levels: Levels = (), hosts: Hosts | None = None
) -> Cost:
    if follows_hosts(levels, dims, hosts) and not HostLayout.of(ranks, hosts).regular:
        family, arguments = _for_uneven(levels)
        return family.cost(ranks=ranks, hosts=hosts, **arguments)
    tree = Hierarchy.of(ranks, dims, levels, hosts)
    total, share = FREE, Fraction(1)
    for level in range(tree.top):
        scatters = tree.scatters(level)
        pair = (Op.REDUCE_SCATTER, Op.ALL_GATHER) if scatters else (Op.REDUCE, Op.BROADCAST)
        for op in pair:
            total += tree.cost(op, level).on(share)
        share /= tree.sizes[level] if scatters else 1
    return total + _top_cost(tree).on(share)


def _pieces_cost(op: Op) -> Callable[..., Cost]:
    """Returns a cost function for an operation in which each level processes a share of the pieces.

    The share is 1 / (ranks of the inner levels). For operations with a root, the share is 1 /
    (ranks of the outer levels).
    """

    def stated(
        ranks: int, *, dims: Dims | None = None, levels: Levels = (), hosts: Hosts | None = None
    ) -> Cost:
        tree = Hierarchy.of(ranks, dims, levels, hosts)
        total = FREE
        for level in range(tree.top + 1):
            others = tree.sizes[level + 1 :] if op.rooted else tree.sizes[:level]
            total += tree.cost(op, level).on(Fraction(1, prod(others)))
        return total

    return stated


def _whole_cost(op: Op) -> Callable[..., Cost]:
    """Returns a cost function for an operation in which each level processes the whole vector."""

    def stated(
        ranks: int, *, dims: Dims | None = None, levels: Levels = (), hosts: Hosts | None = None
    ) -> Cost:
        tree = Hierarchy.of(ranks, dims, levels, hosts)
        return sum((tree.cost(op, level) for level in range(tree.top + 1)), FREE)

    return stated


@algorithm(Op.ALL_REDUCE, "hierarchical", cost=_all_reduce_cost)
def all_reduce(
    ranks: int, *, dims: Dims | None = None, levels: Levels = (), hosts: Hosts | None = None
) -> Schedule:
    """Runs reduce-scatters from the innermost level outwards, an all-reduce on the outermost level,
    and all-gathers back inwards.

    Some algorithms, such as trees and chains, have no reduce-scatter. A level with such an
    algorithm reduces to its first rank, then broadcasts. The other ranks of the level take no part
    in the outer levels.

    Rounds: sum over the levels. Bytes: sum over the levels, each on its share of N. Reductions: the
    same. Source: Jia et al., "Highly scalable deep learning training system with mixed-precision"
    (2018), and HCCL; with leaders: Karonis et al., "Exploiting hierarchy in parallel computer
    networks to optimize collective operation performance" (2000).
    """
    if follows_hosts(levels, dims, hosts) and not HostLayout.of(ranks, hosts).regular:
        family, arguments = _for_uneven(levels)
        return family.function(ranks=ranks, hosts=hosts, **arguments)
    tree = Hierarchy.of(ranks, dims, levels, hosts)
    inner = range(tree.top)
    scattered = [level for level in inner if tree.scatters(level)]
    down, up = {}, {}
    for level in inner:
        pieces = level in scattered
        up[level] = tree.part(Op.REDUCE_SCATTER if pieces else Op.REDUCE, level)
        down[level] = tree.part(Op.ALL_GATHER if pieces else Op.BROADCAST, level)
    top = _top_all_reduce(tree)
    unit = lcm(*(part.collective.parts for part in (*up.values(), *down.values(), top)))
    cuts = [n if i in scattered else 1 for i, n in enumerate(tree.sizes)]
    shares = Grid(dims=tuple(reversed(cuts)))
    collective = Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=shares.size * unit)
    composer = Composer(collective, unit)
    lines = Lines(composer=composer, grid=tree.grid, shares=shares, outer_first=True)
    start = 0
    for level, part in (*up.items(), (tree.top, top), *reversed(down.items())):
        leaders = {below: 0 for below in range(level) if below not in scattered}
        outside = [above for above in scattered if above > level]
        start = lines.add(level, part, start=start, free=outside, fixed=leaders)
    return tree.placed(lines.composer.build())


@algorithm(Op.REDUCE_SCATTER, "hierarchical", cost=_pieces_cost(Op.REDUCE_SCATTER))
def reduce_scatter(
    ranks: int, *, dims: Dims | None = None, levels: Levels = (), hosts: Hosts | None = None
) -> Schedule:
    """Runs a reduce-scatter on each level, innermost first, so that data are reduced before they
    leave a host.

    Rounds: sum over the levels. Bytes: sum over the levels, each on N / (ranks of the inner
    levels). Reductions: the same. Source: Cho et al., "BlueConnect: decomposing all-reduce for deep
    learning on heterogeneous network hierarchy" (2019).
    """
    tree = Hierarchy.of(ranks, dims, levels, hosts)
    lines, parts = _on_pieces(tree, Op.REDUCE_SCATTER)
    lines.scatter(range(tree.top + 1), parts)
    return tree.placed(lines.composer.build())


@algorithm(Op.ALL_GATHER, "hierarchical", cost=_pieces_cost(Op.ALL_GATHER))
def all_gather(
    ranks: int, *, dims: Dims | None = None, levels: Levels = (), hosts: Hosts | None = None
) -> Schedule:
    """Runs an all-gather on each level, outermost first, so that each piece goes from one host to
    another only once.

    Rounds: sum over the levels. Bytes: sum over the levels, each on N / (ranks of the inner
    levels). Source: Cho et al. (2019).
    """
    tree = Hierarchy.of(ranks, dims, levels, hosts)
    lines, parts = _on_pieces(tree, Op.ALL_GATHER)
    lines.gather(range(tree.top, -1, -1), parts)
    return tree.placed(lines.composer.build())


@algorithm(Op.ALL_TO_ALL, "hierarchical", cost=_whole_cost(Op.ALL_TO_ALL))
def all_to_all(
    ranks: int, *, dims: Dims | None = None, levels: Levels = (), hosts: Hosts | None = None
) -> Schedule:
    """Moves each piece inside its host to the rank that has the same position in the host as the
    destination, then between hosts to the destination.

    Rounds: sum over the levels. Bytes: sum over the levels, each on N, more than `direct`, but in
    fewer, larger messages between hosts. Source: Rajbhandari et al., "DeepSpeed-MoE" (2022),
    hierarchical all-to-all.
    """
    tree = Hierarchy.of(ranks, dims, levels, hosts)
    parts = {level: tree.part(Op.ALL_TO_ALL, level) for level in range(tree.top + 1)}
    unit = lcm(*(part.collective.parts for part in parts.values()))
    composer = Composer(Collective(op=Op.ALL_TO_ALL, ranks=ranks, parts=unit), unit)
    exchange(composer, tree.grid, parts)
    return tree.placed(composer.build())


@algorithm(Op.BROADCAST, "hierarchical", cost=_whole_cost(Op.BROADCAST))
def broadcast(
    ranks: int,
    root: int,
    *,
    dims: Dims | None = None,
    levels: Levels = (),
    hosts: Hosts | None = None,
) -> Schedule:
    """The root sends to one rank of each outermost group. On each inner level, these ranks send to
    one rank of each smaller group.

    Rounds: sum over the levels. Bytes: at most the sum over the levels. Source: Karonis et al.,
    "Exploiting hierarchy in parallel computer networks to optimize collective operation
    performance" (2000).
    """
    return _rooted(Op.BROADCAST, root, Hierarchy.of(ranks, dims, levels, hosts))


@algorithm(Op.REDUCE, "hierarchical", cost=_whole_cost(Op.REDUCE), exact=False)
def reduce(
    ranks: int,
    root: int,
    *,
    dims: Dims | None = None,
    levels: Levels = (),
    hosts: Hosts | None = None,
) -> Schedule:
    """Reduces within each innermost group, then level by level outwards to the root.

    Rounds: sum over the levels. Bytes: at most the sum over the levels. Reductions: at most the sum
    over the levels. Source: Karonis et al. (2000).
    """
    return _rooted(Op.REDUCE, root, Hierarchy.of(ranks, dims, levels, hosts))


@algorithm(Op.SCATTER, "hierarchical", cost=_pieces_cost(Op.SCATTER))
def scatter(
    ranks: int,
    root: int,
    *,
    dims: Dims | None = None,
    levels: Levels = (),
    hosts: Hosts | None = None,
) -> Schedule:
    """Sends all pieces of a group together, first to the outermost groups, then to the inner
    groups. All pieces must have the same length.

    Rounds: sum over the levels. Bytes: at most the sum over the levels, each on N / (ranks of the
    outer levels). Source: Karonis et al. (2000).
    """
    return _rooted(Op.SCATTER, root, Hierarchy.of(ranks, dims, levels, hosts))


@algorithm(Op.GATHER, "hierarchical", cost=_pieces_cost(Op.GATHER), exact=False)
def gather(
    ranks: int,
    root: int,
    *,
    dims: Dims | None = None,
    levels: Levels = (),
    hosts: Hosts | None = None,
) -> Schedule:
    """Gathers the pieces of each group at one rank, which sends them together to the next outer
    level. All pieces must have the same length.

    Rounds: sum over the levels. Bytes: at most the sum over the levels, each on N / (ranks of the
    outer levels). Source: Karonis et al. (2000).
    """
    return _rooted(Op.GATHER, root, Hierarchy.of(ranks, dims, levels, hosts))


def _for_uneven(levels: Levels) -> tuple[Algorithm, dict[str, str]]:
    """Returns the all-reduce algorithm for hosts with different numbers of ranks, and its
    arguments. The arguments name the algorithms of the two levels.
    """
    inside, between = (level.algorithm for level in levels) if levels else ("direct", "direct")
    name = parse(Op.ALL_REDUCE, inside).name
    scatters = name in names(Op.REDUCE_SCATTER) and name in names(Op.ALL_GATHER)
    family = find(Op.ALL_REDUCE, "by_host" if scatters else "leaders")
    return family, {"inside": inside, "between": between}


def _on_pieces(tree: Hierarchy, op: Op) -> tuple[Lines, dict[int, Schedule]]:
    parts = {level: tree.part(op, level) for level in range(tree.top + 1)}
    unit = lcm(*(part.collective.parts for part in parts.values()))
    composer = Composer(Collective(op=op, ranks=tree.grid.size, parts=unit), unit)
    return Lines(composer=composer, grid=tree.grid, shares=tree.grid), parts


def _rooted(op: Op, root: int, tree: Hierarchy) -> Schedule:
    """Returns the schedule of an operation with a root, composed of one operation per level.

    On each level, the operation runs only on the lines of ranks whose coordinates on all inner
    levels equal the root's coordinates.
    """
    root = tree.place(root)
    root_coords = tree.grid.coords(root)
    parts = {level: tree.part(op, level, root_coords[level]) for level in range(tree.top + 1)}
    unit = lcm(*(part.collective.parts for part in parts.values()))
    collective = Collective(op=op, ranks=tree.grid.size, parts=unit, root=root)
    shares = Grid(dims=(1,) * len(root_coords)) if op in BY_PART else tree.grid
    lines = Lines(composer=Composer(collective, unit), grid=tree.grid, shares=shares)
    inwards = op in (Op.BROADCAST, Op.SCATTER)
    start = 0
    for level in reversed(parts) if inwards else parts:
        leaders = {inside: root_coords[inside] for inside in range(level)}
        start = lines.add(level, parts[level], start=start, free=range(level), fixed=leaders)
    return tree.placed(lines.composer.build())


def _top_all_reduce(tree: Hierarchy) -> Schedule:
    """Returns the all-reduce of the outermost level. If the level's algorithm has no all-reduce,
    the result is a sequence of two operations.
    """
    text, ranks = tree.algorithms[tree.top], tree.sizes[tree.top]
    if not tree.serves(tree.top, Op.ALL_REDUCE):
        if tree.scatters(tree.top):
            return operation_sequences.reduce_scatter_all_gather(ranks, reduce_scatter=text)
        return operation_sequences.reduce_broadcast(ranks, reduce=text)
    return tree.part(Op.ALL_REDUCE, tree.top)


def _top_cost(tree: Hierarchy) -> Cost:
    if not tree.serves(tree.top, Op.ALL_REDUCE):
        scatters = tree.scatters(tree.top)
        pair = (Op.REDUCE_SCATTER, Op.ALL_GATHER) if scatters else (Op.REDUCE, Op.BROADCAST)
        return sum((tree.cost(op, tree.top) for op in pair), FREE)
    return tree.cost(Op.ALL_REDUCE, tree.top)
