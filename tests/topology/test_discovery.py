"""Recorded machines, as trees of files in the layout of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.topology import LinkKind, NodeKind, from_json, to_json
from unisono.topology.discovery import discover, nvlinks, survey
from unisono.topology.discovery.gpus import address


class Tree:
    """A writer of a sysfs tree in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.root / target)

    def cores(self, numa: dict[int, str], siblings: dict[int, str]) -> None:
        for node, cpus in numa.items():
            self.write(f"devices/system/node/node{node}/cpulist", cpus)
        self.write("devices/system/cpu/online", ",".join(map(str, siblings)))
        for cpu, threads in siblings.items():
            self.write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", threads)

    def device(
        self, path: str, code: str, *, vendor: str = "0x15b3", numa: int = 0, width: int = 16
    ) -> str:
        where = f"devices/pci0000:00/{path}"
        self.write(f"{where}/class", code)
        self.write(f"{where}/vendor", vendor)
        self.write(f"{where}/numa_node", str(numa))
        self.write(f"{where}/current_link_speed", "16.0 GT/s PCIe")
        self.write(f"{where}/current_link_width", str(width))
        self.link(f"bus/pci/devices/{path.rsplit('/', 1)[-1]}", where)
        return where


@pytest.fixture
def gpu_server(tmp_path: Path) -> Path:
    """Writes two NUMA nodes, each with a PCIe switch, two GPUs and a network card, plus another
    network card.
    """
    tree = Tree(tmp_path)
    tree.cores({0: "0-1,4-5", 1: "2-3,6-7"}, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    for node in (0, 1):
        port, switch = f"0000:{node}0:01.0", f"0000:{node}1:00.0"
        above = f"{port}/{switch}"
        tree.device(port, "0x060400", numa=node)
        tree.device(above, "0x060400", numa=node)
        for slot in (0, 1):
            gpu = f"{above}/0000:{node}2:0{slot}.0/0000:{node}{3 + slot}:00.0"
            tree.device(gpu.rsplit("/", 1)[0], "0x060400", numa=node)
            tree.device(gpu, "0x030200", vendor="0x10de", numa=node)
        card = tree.device(f"{above}/0000:{node}6:00.0", "0x020700", numa=node, width=8)
        tree.write(f"{card}/infiniband/mlx5_{node}/ports/1/rate", "400 Gb/sec (4X NDR)")
        tree.link(f"{card}/infiniband/mlx5_{node}/device", card)
        tree.link(f"class/infiniband/mlx5_{node}", f"{card}/infiniband/mlx5_{node}")
    own = tree.device("0000:00:05.0", "0x020000", numa=-1)
    tree.write(f"{own}/net/eth0/speed", "25000")
    tree.link(f"{own}/net/eth0/device", own)
    tree.link("class/net/eth0", f"{own}/net/eth0")
    tree.write("devices/virtual/net/lo/mtu", "65536")
    tree.link("class/net/lo", "devices/virtual/net/lo")
    # The graphics chip of a server's console is not a GPU for computation.
    tree.device("0000:00:07.0", "0x030000", vendor="0x1a03")
    return tmp_path


def test_a_gpu_server_is_discovered(gpu_server: Path) -> None:
    machine = survey(gpu_server)
    assert machine.cores == {0: 0, 1: 0, 2: 1, 3: 1}
    assert [gpu.address for gpu in machine.gpus] == [
        "0000:03:00.0", "0000:04:00.0", "0000:13:00.0", "0000:14:00.0",
    ]  # fmt: skip
    assert [card.title for card in machine.cards] == [
        "eth0 25000 Mbit/s", "mlx5_0 400000 Mbit/s", "mlx5_1 400000 Mbit/s",
    ]  # fmt: skip
    node = machine.topology()
    kinds = [int((node.nodes.kind == kind).sum()) for kind in NodeKind]
    assert kinds == [4, 0, 0, 2, 2, 3]
    # GPUs of one switch: a link up and a link down. Others: two links up, one between the sockets,
    # and two down.
    assert [len(node.route(0, dst)) for dst in range(4)] == [0, 2, 5, 5]
    lanes = 16e9 / 8 * 128 / 130
    assert node.links.bandwidth_Bps[node.route(0, 1)] == pytest.approx([16 * lanes] * 2)
    names = dict(zip(node.nodes.names, range(node.num_nodes), strict=True))
    assert "0000:01:00.0" in names
    card = node.links.src == names["mlx5_0 400000 Mbit/s"]
    assert node.links.bandwidth_Bps[card] == pytest.approx([8 * lanes])
    assert from_json(to_json(node)) == node


def test_nvlinks_are_added(gpu_server: Path) -> None:
    machine = survey(gpu_server)
    first, second = machine.gpus[0].address, machine.gpus[1].address
    pair = machine.topology({first: {second: 4}, second: {first: 4}})
    (link,) = pair.route(0, 1)
    assert pair.links.kind[link] == LinkKind.NVLINK and pair.links.bandwidth_Bps[link] == 100e9
    switched = machine.topology({gpu.address: {"ffff:ff:ff.0": 18} for gpu in machine.gpus})
    assert switched.nodes.names[-1] == "nvswitch"
    assert switched.links.bandwidth_Bps[switched.route(0, 3)].tolist() == [450e9] * 2


def test_without_gpus_the_cores_are_ranks(tmp_path: Path) -> None:
    Tree(tmp_path).cores({0: "0-3", 1: "4-7", 2: ""}, {cpu: str(cpu) for cpu in range(8)})
    node = discover(tmp_path)
    assert node.num_ranks == 8
    assert node.nodes.names[:2] == ("core0", "core1")
    assert len(node.route(0, 3)) == 2 and len(node.route(0, 4)) == 3


def test_a_container_without_numa_nodes_is_discovered(tmp_path: Path) -> None:
    Tree(tmp_path).write("devices/system/cpu/cpu0/uevent", "")
    node = discover(tmp_path)
    assert node.num_ranks == 1 and node.diameter() == 0
    with pytest.raises(ValueError, match="expected cores or GPUs"):
        discover(tmp_path / "nothing")


def test_this_machine_is_discovered() -> None:
    node = discover()
    assert node.num_ranks >= 1
    assert node.diameter() >= (node.num_ranks > 1)


def test_nvml_addresses_are_converted() -> None:
    assert address(b"00000000:3B:00.0") == "0000:3b:00.0"
    assert isinstance(nvlinks(), dict)
