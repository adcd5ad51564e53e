"""Computes PageRank of a random web, where each rank holds a part of the pages.

Covers: `reduce_scatter`, `all_reduce`. Scenario: 4 ranks with 250 of 1000 pages each. A page gives
its rank to the pages that it links to. Each process computes what its pages give to all pages; a
reduce_scatter adds these vectors and returns to each process the sums of its own pages.

    python examples/pagerank.py
"""

import numpy as np

import unisono

PAGES, LINKS, DAMPING = 1000, 8, 0.85
TARGETS = np.random.default_rng(3).integers(PAGES, size=(PAGES, LINKS))
"""The pages to which each page links."""


def given(ranks, targets):
    """Returns what pages of these ranks give to each page of the web."""
    shares = np.repeat(ranks / LINKS, LINKS)
    return np.bincount(targets.ravel(), weights=shares, minlength=PAGES)


def program():
    with unisono.init() as comm:
        mine = slice(comm.rank * PAGES // comm.size, (comm.rank + 1) * PAGES // comm.size)
        ranks, change, steps = np.full(PAGES // comm.size, 1 / PAGES), 1.0, 0
        while change > 1e-10:
            received = comm.reduce_scatter(given(ranks, TARGETS[mine]))
            new = (1 - DAMPING) / PAGES + DAMPING * received
            change = comm.all_reduce(np.array([np.abs(new - ranks).sum()]))[0]
            ranks, steps = new, steps + 1
        return ranks, steps


if __name__ == "__main__":
    results = unisono.run(program, ranks=4)
    found = np.concatenate([ranks for ranks, _ in results])
    matrix = np.zeros((PAGES, PAGES))
    np.add.at(matrix, (TARGETS.ravel(), np.repeat(np.arange(PAGES), LINKS)), 1 / LINKS)
    right_side = np.full(PAGES, (1 - DAMPING) / PAGES)
    exact = np.linalg.solve(np.eye(PAGES) - DAMPING * matrix, right_side)
    assert np.abs(found - exact).max() < 1e-9
    best = np.argsort(-found)[:3]
    print(
        f"after {results[0][1]} steps, the best pages are {best.tolist()}: {found[best].round(5)}"
    )
