"""Reductions and multicasts in switches, which combine several messages into one tree.

A tree has all messages that are reduced into one chunk, or that carry one chunk to several ranks. A
tree is one task, which uses all links of the messages' paths. A switch that reduces
(`Nodes.reduces`) combines the streams that it receives for one destination into one stream. The
switch also copies one received stream to several destinations. The task occupies each link with the
number of streams that remain there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.schedule import Columns
from unisono.simulator.job import Job
from unisono.simulator.paths import NetworkPaths, PathBuilder
from unisono.topology import Floats, Ints, Ragged, ints, starts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Trees:
    """Messages of a schedule, each of which combines one or more transfers. `group` contains, for
    each transfer, the number of its message. Each message has a number of `chunks`; `joined` is
    true for a tree. Each tree has the resources that it uses, the number of `streams` on each
    resource, a source, and the latency of its longest path.
    """

    group: NDArray[np.int32]
    chunks: Floats
    joined: NDArray[np.bool_]
    resources: Ragged
    streams: Floats
    src: Ints
    latency_s: Floats

    def add_to(self, paths: PathBuilder) -> Ints:
        """Adds the trees' paths. Returns the path of each message, or 0 for a message that is not a
        tree."""
        first = paths.over(self.resources, self.streams, self.src, self.latency_s)
        found = np.zeros(len(self.joined), np.int64)
        found[self.joined] = first + np.arange(int(self.joined.sum()))
        return found


def trees_of(job: Job, network: NetworkPaths) -> Trees | None:
    """Returns the trees of a schedule, or None if no switch reduces."""
    if not network.topology.nodes.reduces.any():
        return None
    t = job.schedule.columns
    members = ints(list(job.members))
    src, dst = members[t.src], members[t.dst]
    group, joined = _groups(t, src != dst)
    first = np.unique(group, return_index=True)[1]
    chunks = np.where(joined, t.count[first], np.bincount(group, t.count))
    rows = np.flatnonzero(joined[group])
    link, owner, latency = _routes_of(network, src[rows], dst[rows], ints(t.channel[rows]))
    owner = rows[owner]
    number = np.cumsum(joined) - 1  # for a message that is a tree, its index among the trees
    longest = np.zeros(int(joined.sum()))
    np.maximum.at(longest, number[group[rows]], latency)
    tree, resource, streams = _streams(network, number[group[owner]], link, src[owner], dst[owner])
    return Trees(
        group=group.astype(np.int32),
        chunks=chunks.astype(np.float64),
        joined=joined,
        resources=(resource, starts_of(ints(np.bincount(tree, minlength=len(longest))))),
        streams=streams,
        src=src[first[joined]],
        latency_s=longest,
    )


def _groups(t: Columns, remote: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """Returns the message of each transfer, and a flag for each message that is a tree.

    Transfers of a round form a tree if they carry one chunk to several ranks, or reduce into one
    chunk. Trees with a common transfer are merged. Other transfers of a round form one message if
    they have the same ranks and channel.
    """
    each = np.where(remote, -1, np.arange(len(t)))
    sent = _row_numbers(t.round, t.src, t.src_chunk, t.count, each)
    reduced = _row_numbers(
        t.round, t.dst, t.dst_chunk, t.count, np.where(t.reduce, each, np.arange(len(t)))
    )
    label = np.arange(len(t))
    while True:
        before = label
        for key in (sent, reduced):
            least = np.full(len(t), len(t))
            np.minimum.at(least, key, label)
            label = least[key]
        if np.array_equal(label, before):
            break
    tree = np.bincount(label, minlength=len(t))[label] > 1
    pair = _row_numbers(t.round, t.src, t.dst, t.channel, tree)
    head = np.full(len(t), len(t))
    np.minimum.at(head, pair, np.arange(len(t)))
    label = np.where(tree, label, head[pair])
    first, group = np.unique(label, return_inverse=True)
    return ints(group), tree[first]


def _row_numbers(*columns: NDArray[Any]) -> Ints:
    """Returns a number for each row of the columns; equal rows have equal numbers."""
    return ints(np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1))


def _routes_of(
    network: NetworkPaths, src: Ints, dst: Ints, channel: Ints
) -> tuple[Ints, Ints, Floats]:
    """Returns three arrays: the links of all paths, the index of the transfer that uses each of
    these links, and the latency of each path."""
    links, owners, done = [ints([])], [ints([])], 0
    for (values, starts), _ in network.routes(src, dst, channel):
        links.append(values)
        owners.append(np.repeat(np.arange(done, done + len(starts) - 1), np.diff(starts)))
        done += len(starts) - 1
    link, owner = np.concatenate(links), np.concatenate(owners)
    wait = network.topology.links.latency_s[link]
    total: Floats = np.bincount(owner, wait, minlength=len(src)).astype(np.float64)
    return link, owner, total


def _streams(
    network: NetworkPaths, tree: Ints, link: Ints, src: Ints, dst: Ints
) -> tuple[Ints, Ints, Floats]:
    """Returns three columns, sorted by tree: the tree, a resource that the tree uses, and the
    number of the tree's streams on this resource."""
    reduces, links = network.topology.nodes.reduces, network.topology.links
    width = len(links)
    keys, which, counts = np.unique(tree * width + link, return_inverse=True, return_counts=True)
    sources, goals = _distinct(which, src, len(keys)), _distinct(which, dst, len(keys))
    found, of = np.divmod(keys, width)
    sources[reduces[links.src[of]]] = 1
    goals[reduces[links.dst[of]]] = 1
    taken = np.minimum(sources * goals, counts).astype(np.float64)
    trees, resources, streams = [found], [of], [taken]
    for number, ends, name in ((0, src, "send_Bps"), (1, dst, "receive_Bps")):
        limited = np.isfinite(network.of_endpoints(name)[ends])
        n = network.topology.num_ranks
        tree_at, rank = np.divmod(np.unique(tree[limited] * n + ends[limited]), n)
        trees.append(tree_at)
        resources.append(network.port(number, rank))
        streams.append(np.ones(len(rank)))
    order = np.argsort(np.concatenate(trees), kind="stable")
    return (
        np.concatenate(trees)[order],
        np.concatenate(resources)[order],
        np.concatenate(streams)[order],
    )


def _distinct(which: Ints, value: Ints, total: int) -> Ints:
    """Returns the number of distinct values in each group."""
    width = int(value.max(initial=0)) + 1
    return np.bincount(np.unique(which * width + value) // width, minlength=total)
