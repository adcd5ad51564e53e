"""Links, diameters, distances and bisections match the tables in `tables/`. The tables' first lines
name the sources.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tables import rows

from unisono import topology
from unisono.topology import Topology

TABLES = Path(__file__).parent / "tables"
LINK_BPS = 50e9
"""The default link."""


def verified() -> list[dict[str, str]]:
    return rows(TABLES / "topology_closed_forms_verified.csv")


def build(row: dict[str, str]) -> Topology:
    given = {key: int(value) for key, value in (p.split("=") for p in row["params"].split())}
    match row["topology"]:
        case "ring":
            return topology.ring(given["n"])
        case "torus":
            return topology.torus([given["k"]] * given["n"])
        case "hypercube":
            return topology.hypercube(given["d"])
        case "fattree":
            return topology.fat_tree(given["k"])
        case "dragonfly":
            found = topology.dragonfly(given["a"], given["p"], given["h"], groups=given["g"])
            assert found == topology.dragonfly(given["a"], given["p"], given["h"])
            return found
        case "dragonfly+":
            return topology.dragonfly_plus(given["k"], groups=given["g"])
    raise AssertionError(row)


@pytest.mark.parametrize("row", verified(), ids=lambda row: f"{row['topology']} {row['params']}")
def test_networks_match_the_verified_table(row: dict[str, str]) -> None:
    network = build(row)
    assert network.num_ranks == int(row["hosts"])
    assert network.num_links == int(row["links_formula"]) == int(row["links_bfs"])
    assert network.diameter() == int(row["diam_formula"]) == int(row["diam_host_hops_bfs"])
    assert network.mean_distance() == pytest.approx(float(row["avg_hops_bfs"]), rel=1e-5)
    # The formulas describe actual paths, which may be longer than shortest paths.
    n = network.num_ranks
    links, _ = network.routes(*np.divmod(np.arange(n * n), n))
    assert len(links) / (n * (n - 1)) == pytest.approx(float(row["avg_hops_formula"]), rel=1e-5)


def bisections() -> list[tuple[Topology, float]]:
    """Returns networks, each with the number of links between its halves (the table's column
    bisection_links).
    """
    return [
        *((topology.ring(n), 2) for n in (4, 8, 9)),
        *((topology.torus([k] * n), 2 * k ** (n - 1)) for k, n in ((4, 2), (4, 3), (6, 2))),
        *((topology.grid([k] * n), k ** (n - 1)) for k, n in ((4, 2), (2, 3), (6, 2))),
        *((topology.hypercube(d), 2 ** (d - 1)) for d in (1, 3, 5)),
        *((topology.fat_tree(k, levels=2), k * k / 4) for k in (4, 8)),
        *((topology.fat_tree(k), k**3 / 8) for k in (4, 8)),
        (topology.dragonfly(3, 2, 1), 4**2 / 4),
        (topology.dragonfly_plus(6), 10**2 / 4),
        # with an odd number of groups, the cut leaves each group whole
        (topology.dragonfly(4, 2, 2), 4 * 5),
        (topology.dragonfly_plus(4), 2 * 3),
        (topology.torus([2, 3]), 3),
        (topology.star(8), 4),
        (topology.star(5), 2),
    ]


@pytest.mark.parametrize(("network", "links"), bisections(), ids=repr)
def test_bisections_match_their_closed_forms(network: Topology, links: float) -> None:
    assert network.bisection_Bps() == pytest.approx(links * LINK_BPS)


def test_full_meshes_and_nvswitches_match_their_closed_forms() -> None:
    mesh = topology.mesh(8)
    assert (mesh.num_links, mesh.diameter(), mesh.mean_distance()) == (28, 1, 1.0)
    assert mesh.bisection_Bps() == 8**2 / 4 * 450e9
    node = topology.nvswitch(8, switches=4, links=18)
    assert (node.num_links, node.diameter(), node.mean_distance()) == (8 * 18, 2, 2.0)
    assert node.num_nodes == 8 + 4
    assert node.bisection_Bps() == pytest.approx(8 / 2 * 18 * (450e9 / 18))
    assert node.nodes.reduces.sum() == 4


@pytest.mark.parametrize("k", [4, 6])
def test_a_fat_tree_of_two_levels_matches_its_closed_form(k: int) -> None:
    tree, n = topology.fat_tree(k, levels=2), k * k // 2
    assert (tree.num_ranks, tree.num_nodes - n, tree.num_links) == (n, k + k // 2, n + n)
    expected = (2 * (k / 2 - 1) + 4 * (n - k / 2)) / (n - 1)
    assert tree.diameter() == 4 and tree.mean_distance() == pytest.approx(expected)


def test_oversubscription_divides_the_bisection() -> None:
    full, half = topology.fat_tree(8), topology.fat_tree(8, oversubscription=2)
    assert half.num_ranks == full.num_ranks
    assert half.bisection_Bps() == full.bisection_Bps() / 2
    spread = [
        topology.leaf_spine(leaves=4, spines=2, hosts=6, oversubscription=ratio).bisection_Bps()
        for ratio in (1, 3)
    ]
    assert spread == pytest.approx([12 * LINK_BPS, 4 * LINK_BPS])
