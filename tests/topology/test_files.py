"""Topologies are converted to JSON, networkx graphs, NCCL's files and specs, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import networkx
import numpy as np
import pytest

from unisono import topology
from unisono.topology import LinkKind, NodeKind, parse
from unisono.topology.spec import EXAMPLES, names

PERLMUTTER = """
<system version="1">
  <cpu numaid="3" affinity="ff" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
    <pci busid="0000:03:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="0" sm="80" rank="0" gdr="1">
        <nvlink target="0000:41:00.0" count="4" tclass="0x030200"/>
      </gpu>
    </pci>
    <nic><net name="hsn0" dev="0" speed="200000" port="0" gdr="0"/></nic>
  </cpu>
  <cpu numaid="2" affinity="ff00" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
    <pci busid="0000:41:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="1" sm="80" rank="1" gdr="1">
        <nvlink target="0000:03:00.0" count="4" tclass="0x030200"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""
H100 = """
<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:a1:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:a3:00.0" class="0x020000" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_7" dev="7" speed="400000" port="1" gdr="1"/></nic>
      </pci>
      <pci busid="0000:a5:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="0">
        <gpu dev="1" sm="90" rank="1" gdr="1">
          <nvlink target="0000:f5:00.0" count="5" tclass="0x068000"/>
          <nvlink target="0000:f4:00.0" count="13" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:a4:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="0">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:f5:00.0" count="18" tclass="0x068000"/>
        </gpu>
      </pci>
    </pci>
  </cpu>
</system>
"""


@pytest.mark.parametrize("spec", EXAMPLES)
def test_json_and_networkx_preserve_the_network(spec: str) -> None:
    network = parse(spec)
    assert topology.from_json(topology.to_json(network)) == network
    again = topology.from_networkx(topology.to_networkx(network))
    assert again.nodes.kind.tolist() == network.nodes.kind.tolist()
    assert again.links == network.links
    assert (again.name, again.num_ranks, again.relays) == (
        network.name,
        network.num_ranks,
        network.relays,
    )


def test_plain_graphs_are_networks_of_ranks() -> None:
    network = topology.from_networkx(networkx.petersen_graph(), name="petersen")
    assert (network.num_ranks, network.num_links, network.diameter()) == (10, 15, 2)
    with pytest.raises(ValueError, match="unknown NodeKind router; expected one of rank, switch"):
        graph = networkx.Graph()
        graph.add_node(0, kind="router")
        topology.from_networkx(graph)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a topology"),
        ('{"format": "unisono-topology", "version": 2}', "got 2"),
        ('{"format": "unisono-topology", "version": 1}', "incomplete"),
    ],
)
def test_other_json_is_rejected(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        topology.from_json(text)


def test_damaged_topologies_are_rejected() -> None:
    document = json.loads(topology.to_json(topology.ring(4)))
    for table, column, value, says in (
        ("links", "src", 9, "unknown node"),
        ("links", "bandwidth_Bps", 0.0, "bandwidths > 0"),
        ("links", "latency_s", float("inf"), "finite"),
        ("nodes", "kind", 1, "expected ranks as the first 4"),
        ("links", "src", [0, 1], "columns of one length"),
    ):
        damaged = {**document, table: {**document[table], column: value}}
        with pytest.raises(ValueError, match=says):
            topology.from_json(json.dumps(damaged))


def test_columns_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        topology.ring(4).links.bandwidth_Bps[0] = 1.0


def test_nccl_files_may_have_direct_nvlinks_between_sockets() -> None:
    node = topology.from_nccl_xml(PERLMUTTER)
    assert node.num_ranks == 2
    assert node.nodes.names == (
        "0000:03:00.0",
        "0000:41:00.0",
        "cpu3",
        "hsn0 200000 Mbit/s",
        "cpu2",
    )
    (link,) = node.route(0, 1)
    assert node.links.kind[link] == LinkKind.NVLINK
    assert node.links.bandwidth_Bps[link] == 4 * 20e9
    sockets = node.links.bandwidth_Bps[node.links.kind == LinkKind.INTER_SOCKET]
    assert sockets.tolist() == [24e9, 24e9]


def test_nccl_nvswitches_are_merged_and_ranks_ordered() -> None:
    node = topology.from_nccl_xml(H100)
    assert node.nodes.names[:2] == ("0000:a4:00.0", "0000:a5:00.0")
    rates = node.links.bandwidth_Bps[node.route(0, 1)]
    assert rates == pytest.approx([18 * 20.6e9] * 2)
    nvswitch_node = node.links.dst[node.route(0, 1)[0]]
    assert node.nodes.kind[nvswitch_node] == NodeKind.NVSWITCH and node.nodes.reduces[nvswitch_node]
    assert set(node.links.bandwidth_Bps[node.links.kind == LinkKind.PCIE]) == {48e9}


@pytest.mark.parametrize("text", [PERLMUTTER, H100])
def test_nccl_files_survive_a_round_trip(text: str) -> None:
    node = topology.from_nccl_xml(text)
    capability = 80 if 'sm="80"' in text else 90
    again = topology.from_nccl_xml(topology.to_nccl_xml(node, capability=capability))
    assert again.num_ranks == node.num_ranks and again.num_links == node.num_links
    src, dst = np.divmod(np.arange(4), 2)
    assert [
        one.links.bandwidth_Bps[one.routes(src, dst)[0]].tolist() for one in (node, again)
    ].count(node.links.bandwidth_Bps[node.routes(src, dst)[0]].tolist()) == 2
    assert sorted(again.nodes.kind) == sorted(node.nodes.kind)


@pytest.mark.parametrize("spec", ["dgx:8", "pcie_server", "nvswitch:8", "mesh:4"])
def test_servers_can_be_written_as_nccl_files(spec: str) -> None:
    node = parse(spec)
    again = topology.from_nccl_xml(topology.to_nccl_xml(node))
    assert again.num_ranks == node.num_ranks
    assert (again.nodes.kind == NodeKind.NIC).sum() == (node.nodes.kind == NodeKind.NIC).sum()
    nvlinks = [int((one.links.kind == LinkKind.NVLINK).sum()) for one in (node, again)]
    assert nvlinks[0] == nvlinks[1]


def test_networks_that_are_not_servers_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot express network switches"):
        topology.to_nccl_xml(topology.fat_tree(4))
    with pytest.raises(ValueError, match="cannot express infiniband links"):
        topology.to_nccl_xml(topology.torus([4, 4]))
    for text, says in (
        ("<a/>", "expected <system>"),
        ("<", "not XML"),
        ("<system/>", "at least one <gpu>"),
    ):
        with pytest.raises(ValueError, match=says):
            topology.from_nccl_xml(text)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("toros:4", "unknown topology 'toros'; expected one of dgx, dragonfly"),
        ("torus", "an example: torus:4x4"),
        ("torus:0x4", "of at least 1"),
        ("torus:4x", "expected a size"),
        ("ring:4x4", "expected one size, got 4x4"),
        ("fat_tree:k=3", "expected an even k"),
        ("fat_tree:k=4,levels=5", "expected 2 or 3 levels"),
        ("fat_tree:k=4,oversubscription=3", "k/2 = 2"),
        ("fat_tree:q=4", "unknown option q"),
        ("fat_tree:k=four", "expected a number"),
        ("dragonfly:a=4,p=2,h=2,groups=10", "at most 9 groups, got 10"),
        ("dragonfly:a=4,p=2,h=2,routing=random", "expected minimal or valiant"),
        ("ring:8,bandwidth=fast", "expected a rate"),
        ("ring:8,latency=5", "expected a time"),
        ("ring:8,kind=wire", "unknown kind of link"),
        ("ring:8/ring:8", "no network cards"),
        ("dgx:8/ring:9", "expected a multiple of"),
        ("nvswitch:gpus=8,switches=4,links=2", "expected at least 4 links"),
    ],
)
def test_errors_explain_invalid_specs(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(spec)


def test_specs_name_the_network_that_they_build() -> None:
    assert {spec.split(":")[0] for spec in EXAMPLES} | {"rails"} == set(names())
    for spec in EXAMPLES:
        assert parse(parse(spec).name) == parse(spec)


def test_specs_set_the_properties_of_links() -> None:
    links = parse("ring:4,bandwidth=100Gbit,latency=2us,kind=roce").links
    assert set(links.bandwidth_Bps) == {12.5e9} and set(links.latency_s) == {2e-6}
    assert set(links.kind) == {LinkKind.ROCE}


def test_load_selects_the_format_by_the_file_suffix(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "mine.json", tmp_path / "theirs.xml"
    ours.write_text(topology.to_json(topology.ring(4)))
    theirs.write_text(H100)
    assert topology.load(str(ours)) == topology.ring(4)
    assert topology.load(str(theirs)).name == "theirs"
    assert topology.load("ring:4") == topology.ring(4)


def test_networkx_is_imported_only_on_use() -> None:
    script = (
        "import sys; from unisono import topology; topology.discover(); topology.ring(4)\n"
        "assert 'networkx' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
