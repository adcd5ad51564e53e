"""The rate of the links between the hosts of a lab: measured with iperf3, or, on a machine without
iperf3, the stated rate, which limits the links."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from unisono.bench.lab import Lab, LabError

_WARM_UP_S = 1
_PROBE_S = 1
_LISTEN_S = 10.0
_RATE = re.compile(r"([\d.]+)([kmgt]?)(i?)(bit|bps)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """The rate from host 0 to host 1 in bytes per second, over all rails."""

    rate_Bps: float
    why_stated: str | None = None
    """The reason why the rate is the stated one. The stated rate includes the headers of all
    packets. None if iperf3 measured the rate of the payload."""


def why_not_measured() -> str | None:
    """Returns the reason why the rate of links cannot be measured here, or None if it can."""
    if shutil.which("iperf3") is None:
        return "iperf3, which measures the rate of the links, is not installed (apt install iperf3)"
    return None


def link_rate(lab: Lab) -> LinkRate | None:
    """Returns the measured rate of the links, or their stated rate if iperf3 is not installed.
    Returns None if no rate is stated either. Raises LabError."""
    why_stated = why_not_measured()
    if why_stated is None:
        return LinkRate(rate_Bps=probe_payload_Bps(lab))
    stated = [lab.rates.get(host, lab.rate) for host in (0, 1)]
    limits_Bps = [rate_Bps(rate) for rate in stated if rate is not None]
    if not limits_Bps:
        return None
    return LinkRate(rate_Bps=lab.rails * min(limits_Bps), why_stated=why_stated)


def rate_Bps(text: str) -> float:
    """Converts a rate in tc's notation to bytes per second.

    >>> rate_Bps("1gbit"), rate_Bps("8kibit"), rate_Bps("1.5mbps")
    (125000000.0, 1024.0, 1500000.0)
    """
    found = _RATE.fullmatch(text)
    if found is None:
        raise LabError(f"expected a rate such as 1gbit or 200mbit, got {text!r}")
    number, prefix, binary, unit = found.groups()
    base = 1024 if binary else 1000
    per_s = float(number) * float(base) ** " kmgt".index(prefix.lower() or " ")
    return per_s / 8 if unit.lower() == "bit" else per_s


def probe_payload_Bps(lab: Lab) -> float:
    """Returns the bytes per second that iperf3 measures from host 0 to host 1, with one TCP stream
    per rail.

    Takes two seconds, of which the first is a warm-up. Raises LabError.
    """
    if lab.hosts < 2:
        raise LabError("measuring the rate of a link needs two hosts")
    with ExitStack() as stack:
        for rail in range(lab.rails):
            server = ["iperf3", "--server", "--one-off", "--bind", lab.address(1, rail)]
            stack.enter_context(_killed_at_exit(lab.start(1, server, stdout=subprocess.DEVNULL)))
        _await_listeners(lab, 1, lab.rails)
        clients = [
            stack.enter_context(
                _killed_at_exit(lab.start(0, _client(lab, rail), stdout=subprocess.PIPE))
            )
            for rail in range(lab.rails)
        ]
        answers = [client.communicate(timeout=30)[0] for client in clients]
    return sum(_received_Bps(answer) for answer in answers)


def _client(lab: Lab, rail: int) -> list[str]:
    addresses = ["--client", lab.address(1, rail), "--bind", lab.address(0, rail)]
    return ["iperf3", *addresses, "--time", str(_PROBE_S), "--omit", str(_WARM_UP_S), "--json"]


def _received_Bps(answer: bytes) -> float:
    found = json.loads(answer)
    if "error" in found:
        raise LabError(f"iperf3: {found['error']}")
    return float(found["end"]["sum_received"]["bits_per_second"]) / 8


class _killed_at_exit:
    """A context manager that kills the given process when the `with` block ends."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self._process = process

    def __enter__(self) -> subprocess.Popen[Any]:
        return self._process

    def __exit__(self, *reason: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _await_listeners(lab: Lab, host: int, count: int) -> None:
    """Waits until `count` sockets listen on the host."""
    deadline_s = time.monotonic() + _LISTEN_S
    while len(lab.run(host, ["ss", "-Hltn", "sport = :5201"]).splitlines()) < count:
        if time.monotonic() > deadline_s:
            raise LabError("iperf3 did not start; its messages are above")
        time.sleep(0.01)
