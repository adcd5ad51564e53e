"""Layouts of ranks on hosts: random ones and regular ones."""

from __future__ import annotations

from hypothesis import strategies as st

from unisono.algorithms.host_layout import Hosts


@st.composite
def layouts(draw: st.DrawFn, most: int = 9) -> Hosts:
    """Draws 1 to `most` ranks and divides them into hosts. Hosts and their ranks are in any
    order.
    """
    ranks = draw(st.permutations(range(draw(st.integers(1, most)))))
    numbers = draw(st.lists(st.integers(0, 4), min_size=len(ranks), max_size=len(ranks)))
    hosts: dict[int, list[int]] = {}
    for rank, number in zip(ranks, numbers, strict=True):
        hosts.setdefault(number, []).append(rank)
    return tuple(tuple(host) for host in hosts.values())


def regular(hosts: int, each: int) -> Hosts:
    return tuple(tuple(range(h * each, (h + 1) * each)) for h in range(hosts))
