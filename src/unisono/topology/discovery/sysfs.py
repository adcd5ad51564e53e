"""Facts about a machine from sysfs: cores, NUMA nodes, network cards, GPUs, the PCIe tree.

Missing and unreadable files are ignored, because containers and virtual machines expose only some.
Source: the kernel's Documentation/ABI (sysfs-devices-system-cpu, sysfs-bus-pci, sysfs-class-net).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from unisono.topology.discovery.machine import Device, Machine

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")
"""PCI classes of GPUs: 3D controllers, other display controllers, processing accelerators."""
_VGA, _GPU_VENDORS = "0x0300", ("0x10de", "0x1002")
_ENCODING = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130}
"""Fraction of a PCIe lane's bits that are data, by GT/s (PCIe base specification; 64 GT/s uses
flits)."""


def survey(root: Path = Path("/sys")) -> Machine:
    """Returns the cores and devices of this machine, or of the machine whose sysfs was copied to
    `root`.

    >>> len(survey().cores) > 0
    True
    """
    nodes = _numa_nodes(root)
    default = min(nodes, default=0)
    numa_of = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    cores = {cpu: numa_of.get(cpu, default) for cpu in _first_threads(root)}
    names = {**_network(root), **_infiniband(root)}
    devices = []
    pci = root / "bus/pci/devices"
    for path in sorted(pci.iterdir()) if pci.is_dir() else []:
        real = path.resolve()
        gpu = _is_gpu(real)
        if real.name not in names and not gpu:
            continue
        name, rate = names.get(real.name, ("", None))
        node = _number(real / "numa_node")
        devices.append(
            Device(
                address=real.name,
                name=name or real.name,
                gpu=gpu,
                numa=node if node is not None and node in nodes else default,
                path=tuple(_bridges(real)),
                rate_Bps=rate,
            )
        )
    return Machine(cores=cores, devices=tuple(devices))


def parse_list(text: str) -> list[int]:
    """Parses a list of numbers in the kernel's notation.

    >>> parse_list("0-2,7"), parse_list("")
    ([0, 1, 2, 7], [])
    """
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _numa_nodes(root: Path) -> dict[int, list[int]]:
    """Returns the CPUs of each NUMA node that has CPUs."""
    found = {}
    for path in (root / "devices/system/node").glob("node[0-9]*"):
        cpus = _list(path / "cpulist")
        if cpus:
            found[int(path.name.removeprefix("node"))] = cpus
    return found


def _first_threads(root: Path) -> list[int]:
    """Returns one CPU of each core that is online."""
    system = root / "devices/system/cpu"
    online = _list(system / "online")
    if not online:
        online = sorted(int(p.name[3:]) for p in system.glob("cpu[0-9]*"))
    here = set(online)
    seen: set[int] = set()
    first = []
    for cpu in online:
        if cpu in seen:
            continue
        first.append(cpu)
        seen.update(here.intersection(_list(system / f"cpu{cpu}/topology/thread_siblings_list")))
    return first


def _network(root: Path) -> dict[str, tuple[str, float | None]]:
    """Returns the name and rate of each network interface that is a PCI device, by PCI address."""
    found: dict[str, tuple[str, float | None]] = {}
    for path in _entries(root / "class/net"):
        where = _address(path / "device")
        if where is not None:
            mbps = _number(path / "speed")
            found[where] = path.name, mbps * 1e6 / 8 if mbps is not None and mbps > 0 else None
    return found


def _infiniband(root: Path) -> dict[str, tuple[str, float | None]]:
    """Returns the name and rate of each RDMA device, by PCI address."""
    found: dict[str, tuple[str, float | None]] = {}
    for path in _entries(root / "class/infiniband"):
        where = _address(path / "device")
        if where is not None:
            match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", _text(path / "ports/1/rate"))
            found[where] = path.name, float(match[1]) * 1e9 / 8 if match else None
    return found


def _address(device: Path) -> str | None:
    """Returns the address of the PCI device of a network interface. In a virtual machine, the PCI
    device is the parent of a virtio device."""
    if not device.exists():
        return None
    real = device.resolve()
    names = (path.name for path in (real, *real.parents))
    return next((name for name in names if _ADDRESS.fullmatch(name)), None)


def _bridges(real: Path) -> Iterator[tuple[str, float | None]]:
    """Yields an address and a rate for each bridge from the root down to a device, then for the
    device itself. The rate is that of the link towards the root."""
    for path in (*reversed(real.parents), real):
        if _ADDRESS.fullmatch(path.name):
            yield path.name, _lane_rate(path)


def _lane_rate(path: Path) -> float | None:
    """Returns the current rate of a device's PCIe link, in bytes a second, in one direction."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", _text(path / "current_link_speed"))
    width = _number(path / "current_link_width")
    if match is None or not width or width > 32:
        return None
    speed = float(match[1])
    return speed * 1e9 / 8 * width * _ENCODING.get(speed, 0.98)


def _is_gpu(path: Path) -> bool:
    code = _text(path / "class")[:6]
    return code in _GPU_CLASSES[:1] or (
        code in (_VGA, *_GPU_CLASSES) and _text(path / "vendor") in _GPU_VENDORS
    )


def _entries(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""  # some files exist but are unreadable, such as the speed of a link that is down


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _list(path: Path) -> list[int]:
    text = _text(path)
    return parse_list(text) if re.fullmatch(r"[\d,-]+", text) else []
