"""Routes are correct paths with the expected lengths. Distances agree with networkx, and cuts agree
with a search over all cuts.
"""

from __future__ import annotations

from itertools import combinations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import topology
from unisono.topology import Topology, parse
from unisono.topology.ragged_lists import Ints
from unisono.topology.spec import EXAMPLES

SMALL = [
    "ring:1", "ring:2", "ring:3", "torus:2x2", "torus:3x2x2", "torus:5x1x4", "grid:3x4", "line:5",
    "hypercube:0", "hypercube:1", "mesh:1", "mesh:5", "star:1", "star:5",
    "fat_tree:k=2", "fat_tree:k=4,levels=2", "fat_tree:k=4,oversubscription=2",
    "leaf_spine:leaves=3,spines=2,hosts=2", "rails:hosts=6,rails=3,unit=2",
    "dragonfly:a=4,p=1,h=2,groups=4", "dragonfly:a=3,p=2,h=1,groups=3", "dragonfly:a=2,p=2,h=1",
    "dragonfly:a=3,p=1,h=1,groups=1", "dragonfly_plus:k=4,groups=2", "dragonfly_plus:k=2",
    "dragonfly_plus:k=6,groups=4",
    "nvswitch:gpus=4,switches=2,links=3", "dgx:8/torus:2x8", "dgx:8/rails:hosts=4,rails=8,unit=2",
    "pcie_server/dragonfly:a=4,p=2,h=1,groups=4",
]  # fmt: skip
VALIANT = ["dragonfly:a=4,p=2,h=2,routing=valiant", "dragonfly_plus:k=4,routing=valiant"]


def pairs(network: Topology) -> tuple[Ints, Ints]:
    n = network.num_ranks
    return np.divmod(np.arange(n * n), n)


def check_paths(network: Topology, seed: int = 0) -> Ints:
    """Checks that all routes are paths between their ranks. Returns the lengths as an array
    [source, destination].
    """
    src, dst = pairs(network)
    links, starts = network.routes(src, dst, seed=seed)
    lengths = np.diff(starts)
    assert ((lengths == 0) == (src == dst)).all()
    table, go = network.links, lengths > 0
    assert (table.src[links[starts[:-1][go]]] == src[go]).all()
    assert (table.dst[links[starts[1:][go] - 1]] == dst[go]).all()
    joints = np.setdiff1d(np.arange(1, len(links)), starts)
    assert (table.dst[links[joints - 1]] == table.src[links[joints]]).all()
    if not network.relays:
        assert (table.dst[links[joints - 1]] >= network.num_ranks).all()
    return lengths.reshape(network.num_ranks, -1)


def true_distances(network: Topology) -> Ints:
    """Returns the shortest distances, computed by networkx. A path leads through other ranks only
    if the network's ranks relay messages.
    """
    n = network.num_ranks
    graph = topology.to_networkx(network)
    found = np.zeros((n, n), dtype=np.int64)
    for src in range(n):
        seen = graph
        if not network.relays:
            seen = graph.subgraph([src, *range(n, network.num_nodes)])
        hops = networkx.single_source_shortest_path_length(seen, src)
        for dst in range(n):
            if network.relays or dst == src:
                found[src, dst] = hops[dst]
            else:
                found[src, dst] = 1 + min(hops.get(node, 10**6) for node in graph.predecessors(dst))
    return found


@pytest.mark.parametrize("spec", [*EXAMPLES, *SMALL])
def test_routes_and_distances_agree_with_networkx(spec: str) -> None:
    network = parse(spec)
    lengths, expected = check_paths(network), true_distances(network)
    assert network.diameter() == expected.max()
    n = network.num_ranks
    mean = expected.sum() / (n * (n - 1)) if n > 1 else 0.0
    assert network.mean_distance() == pytest.approx(mean)
    assert (lengths >= expected).all()
    if not any(word in spec for word in ("rail", "dragonfly", "/")):
        assert (lengths == expected).all()
    graph = topology.to_networkx(network)
    cables = {frozenset((a, b)): graph.number_of_edges(a, b) for a, b in graph.edges()}
    assert network.num_links == sum(cables.values())
    assert network.bisection_Bps() > 0 or n == 1


@pytest.mark.parametrize("spec", VALIANT)
def test_valiant_paths_pass_through_another_group(spec: str) -> None:
    network, minimal = parse(spec), parse(spec.removesuffix(",routing=valiant"))
    lengths = check_paths(network, seed=3)
    assert lengths.sum() > 1.3 * check_paths(minimal).sum()
    assert lengths.max() <= 10


def test_valiant_spreads_traffic_that_minimal_sends_over_one_link() -> None:
    """Tests that Valiant routing loads the busiest link less than minimal routing. Every group
    sends to the next group, which is the worst pattern for minimal routing (ISCA 2008).
    """
    busiest = {}
    for routing in ("minimal", "valiant"):
        network = topology.dragonfly(4, 2, 2, routing=routing)
        src = np.arange(72)
        links, _ = network.routes(src, (src + 8) % 72)
        busiest[routing] = np.bincount(links).max()
    assert busiest["minimal"] == 8
    assert busiest["valiant"] < 8


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    wrap=st.booleans(),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=25, deadline=None)
def test_any_box_has_shortest_routes(sizes: list[int], wrap: bool, seed: int) -> None:
    network = topology.torus(sizes) if wrap else topology.grid(sizes)
    graph = networkx.grid_graph(sizes[::-1], periodic=wrap)
    lengths = check_paths(network, seed)
    assert network.num_ranks == len(graph)
    flat = dict(networkx.all_pairs_shortest_path_length(graph))
    strides = np.cumprod([1, *sizes[:-1]])

    def number(point: int | tuple[int, ...]) -> int:
        coords = (point,) if isinstance(point, int) else point
        return int(np.dot(coords, strides))

    for one, hops in flat.items():
        for other, distance in hops.items():
            assert lengths[number(one), number(other)] == distance


@given(nodes=st.integers(2, 8), chance=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_any_graph_has_shortest_routes_and_the_least_cut(
    nodes: int, chance: float, seed: int
) -> None:
    tree = networkx.random_labeled_tree(nodes, seed=seed)
    graph = networkx.compose(networkx.gnp_random_graph(nodes, chance, seed=seed), tree)
    network = topology.from_networkx(graph).with_links(bandwidth_Bps=1.0)
    assert (check_paths(network, seed) == true_distances(network)).all()
    halves = combinations(range(nodes), nodes // 2)
    assert network.bisection_Bps() == min(networkx.cut_size(graph, half) for half in halves)


@pytest.mark.parametrize(
    "spec",
    ["torus:4x2", "grid:4x2", "hypercube:3", "ring:7", "star:6", "fat_tree:k=4,levels=2",
     "leaf_spine:leaves=2,spines=3,hosts=3", "rails:hosts=4,rails=2",
     "dragonfly:a=2,p=1,h=1,groups=2"],
)  # fmt: skip
def test_textbook_cuts_are_the_least(spec: str) -> None:
    network = parse(spec)
    anonymous = topology.from_networkx(topology.to_networkx(network))
    assert anonymous.bisection_Bps() == pytest.approx(network.bisection_Bps())


def test_ecmp_uses_every_path_and_is_deterministic() -> None:
    tree = topology.fat_tree(8)
    src, dst = np.zeros(4096, dtype=np.int64), np.full(4096, 127)
    tops = set()
    for seed in range(200):
        links = tree.route(0, 127, seed=seed)
        assert links == tree.route(0, 127, seed=seed)
        tops.add(int(tree.links.dst[links[2]]))
    assert len(tops) == 16
    assert len(set(tree.routes(src, dst)[0].tolist())) == 6
    everyone = np.arange(64)
    links, _ = tree.routes(everyone, everyone + 64)
    assert np.bincount(links).max() <= 8


def test_opposite_ranks_of_a_ring_use_both_directions() -> None:
    ring = topology.ring(8)
    src = np.arange(8)
    links, _ = ring.routes(src, (src + 4) % 8)
    assert set(np.bincount(links, minlength=16)) == {2}


def test_explicit_paths_and_choices_between_them() -> None:
    ring = topology.ring(6)
    up, down = ring.route(0, 2), [ring.route(0, 5)[0], *ring.route(5, 2)[:0]]
    detour = [*ring.route(0, 5), *ring.route(5, 4), *ring.route(4, 3), *ring.route(3, 2)]
    one = ring.with_routes({(0, 2): detour})
    assert one.route(0, 2) == detour and one.route(1, 3) == ring.route(1, 3)
    both = ring.with_routes({(0, 2): [up, detour]})
    assert {tuple(both.route(0, 2, seed=seed)) for seed in range(30)} == {
        tuple(up),
        tuple(detour),
    }
    assert topology.from_json(topology.to_json(both)) == both
    with pytest.raises(ValueError, match="ends at node 5"):
        ring.with_routes({(0, 2): down})
    with pytest.raises(ValueError, match="does not start at node 0"):
        ring.with_routes({(0, 2): ring.route(1, 2)})


def test_failed_links_are_avoided() -> None:
    torus = topology.torus([4, 4])
    broken = torus.without(torus.route(0, 1))
    lengths = check_paths(broken)
    assert lengths[0, 1] == 3 and lengths[1, 0] == 1
    assert broken.num_links == 32
    with pytest.raises(ValueError, match="no path"):
        topology.line(3).without(topology.line(3).route(0, 1)).diameter()


def test_errors_name_invalid_ranks() -> None:
    with pytest.raises(ValueError, match=r"expected ranks in 0\.\.7, got 8"):
        topology.ring(8).route(0, 8)
    with pytest.raises(ValueError, match="sources"):
        topology.ring(8).routes(np.zeros(2), np.zeros(3))


def test_nvlink_is_preferred_to_pcie_inside_a_server() -> None:
    node = topology.dgx(8)
    kinds = node.links.kind[node.route(0, 1)]
    assert set(kinds.tolist()) == {topology.LinkKind.NVLINK}


def test_rails_route_through_their_leaf() -> None:
    pod = topology.rail_optimised(hosts=16, gpus=8, unit=4)
    lengths = check_paths(pod)
    assert (
        lengths[0, 8] == 6 and lengths[0, 9] == 8 and lengths[0, 8 * 4] == 8 and lengths[0, 7] == 2
    )


@pytest.mark.parametrize(
    "spec", ["fat_tree:k=64", "torus:256x256", "rail_optimised:hosts=8192,gpus=8,unit=64"]
)
def test_topologies_of_65536_ranks_have_routes_and_diameters(spec: str) -> None:
    network = parse(spec)
    assert network.num_ranks == 65536
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, 65536, (2, 2000))
    links, starts = network.routes(src, dst)
    assert (network.links.dst[links[starts[1:] - 1]] == dst).all()
    assert network.diameter() in (6, 256, 8)


def test_a_slow_link_counts_in_the_bisection() -> None:
    ring = topology.ring(8)
    rates = ring.links.bandwidth_Bps.copy()
    rates[ring.route(3, 4)] /= 5
    assert ring.with_links(bandwidth_Bps=rates).bisection_Bps() == pytest.approx(60e9)
    assert ring.with_links(latency_s=1.0).links.latency_s.tolist() == [1.0] * 16
