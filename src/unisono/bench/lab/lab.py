"""The lab itself: hosts, links between them, and what can happen to both."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.bench.lab import holder
from unisono.bench.lab.shaping import Shaping
from unisono.errors import UnisonoError

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_SWITCH = "switch"
_COMMAND_S = 20.0
_MOST_HOSTS = 250
_RATE = re.compile(r"(?=.*[1-9])\d+(\.\d+)?([kmgt]i?)?(bit|bps)", re.IGNORECASE)
"""tc takes what is negative for no limit at all."""
_QUEUE_PACKETS = 20_000
"""What a delayed link holds: a full window of 10 Gbit/s over 20 ms."""


class LabError(UnisonoError):
    """The lab could not be made, or a command in it failed."""


def reason_unavailable() -> str | None:
    """Why there can be no lab on this machine, or None if there can."""
    if os.geteuid() != 0:
        return "the lab needs root (it makes network namespaces)"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"the lab needs the command {tool} (Debian: apt install {package})"
    words = ["unshare", "--net", "--mount", "--uts", "true"]
    attempt = subprocess.run(words, capture_output=True, text=True, check=False)
    if attempt.returncode:
        return f"the lab may make no namespaces here: {attempt.stderr.strip()}"
    return None


class Lab:
    """Hosts on this machine, each with an address on every rail. A context manager.

    `rate` (as tc writes it: "1gbit", "200mbit") limits every link both ways; None does not.
    `rates` says so of hosts whose links have another.
    `shaping` tells how.
    `delay` ("1ms") is added to every way from one host to another. Host `h` (from 0) is called
    `host<h>`, and has `<subnet>.<rail>.<h + 1>` on its interface `eth<rail>`. Several labs do not
    see each other, even with equal addresses; nor does the machine's own network see them.

    Nothing is left behind, also when the process that made the lab is killed.
    Raises LabError, which says what is missing.

        with Lab(hosts=2, rate="1gbit") as lab:
            print(lab.run(0, ["ping", "-c", "1", lab.address(1)]))
    """

    def __init__(
        self,
        *,
        hosts: int = 4,
        rate: str | None = None,
        rates: Mapping[int, str] | None = None,
        rails: int = 1,
        delay: str | None = None,
        subnet: str = "10.77",
        shaping: Shaping | None = None,
    ) -> None:
        if delay is not None and shaping is not None and shaping.fair:
            raise ValueError("a lab whose ports are fair has no delays")
        if not 1 <= hosts <= _MOST_HOSTS or not 1 <= rails <= _MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {_MOST_HOSTS} hosts, and as many rails at most")
        for given in (rate, *(rates or {}).values()):
            if given is not None and not _RATE.fullmatch(given):
                raise LabError(f"a rate is written as 1gbit or 200mbit, not {given!r}")
        self.hosts = hosts
        self.rails = rails
        self.rate = rate
        self.rates = dict(rates or {})
        self.delay = delay
        self.shaping = shaping or Shaping()
        self._subnet = subnet
        self._holders: dict[int | str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    # ---- what there is

    def address(self, host: int, rail: int = 0) -> str:
        """The host's address on this rail."""
        return f"{self._subnet}.{rail}.{host + 1}"

    def holder(self, host: int | str) -> int:
        """The process whose namespaces are the host: who enters them is on it."""
        return self._holders[host].pid

    def command(self, host: int | str, words: Sequence[str]) -> list[str]:
        """What runs a command on the host, in this directory. The process becomes the command."""
        enter = ["nsenter", f"--target={self.holder(host)}", "--net", "--mount", "--uts", "--"]
        return [*enter, "env", f"--chdir={Path.cwd()}", *words]

    def processes(self, host: int) -> list[int]:
        """Pids of all processes on the host."""
        return holder.members(self._holders[host].pid)

    # ---- what can be done on it

    def start(
        self, host: int, words: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """A process on the host; `options` are those of `subprocess.Popen`."""
        return subprocess.Popen(self.command(host, words), env=env, **options)

    def run(self, host: int | str, words: Sequence[str], timeout_s: float = _COMMAND_S) -> str:
        """Run a command on the host to its end; its standard output. Raises LabError."""
        return _run(self.command(host, words), timeout_s=timeout_s)

    def write_agent(self, path: Path) -> None:
        """Write a program that launchers can use in place of ssh: `path ADDRESS COMMAND...`."""
        cases = "".join(
            f"{self.address(host)} | host{host}) pid={self._holders[host].pid} ;;\n"
            for host in range(self.hosts)
        )
        path.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done # options of ssh\n'
            f'case "$1" in\n{cases}*) echo "no host $1 in the lab" >&2; exit 1 ;;\nesac\nshift\n'
            f"cd {Path.cwd()}\n"
            'exec nsenter --target="$pid" --net --mount --uts -- sh -c "$*"\n'
        )
        path.chmod(0o755)

    # ---- what can happen to it

    def cut(self, host: int, rail: int = 0, *, carrier: bool = True) -> None:
        """Cut a link: nothing gets through any more, and nobody is told.

        Without `carrier` the host sees its interface lose the link, as when a cable is pulled.
        """
        port = _port(host, rail)
        self.run(_SWITCH, ["ip", "link", "set", port, *(["nomaster"] if carrier else ["down"])])

    def mend(self, host: int, rail: int = 0) -> None:
        """Bring a link that was cut back as it was."""
        port = _port(host, rail)
        self.run(_SWITCH, ["ip", "link", "set", port, "master", f"rail{rail}", "up"])

    def kill(self, host: int) -> None:
        """Kill all processes on the host. The kernel closes their connections, and peers see it."""
        holder.end_members(self._holders[host].pid)

    def power_off(self, host: int) -> None:
        """As if the host lost power: its links fall silent, then its processes end."""
        for rail in range(self.rails):
            self.cut(host, rail)
        self.kill(host)

    # ---- how it comes and goes

    def up(self) -> None:
        """Make hosts and links. Raises LabError."""
        if reason := reason_unavailable():
            raise LabError(reason)
        try:
            self._hold()
            self._wire()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process in the lab, and remove it. Never raises."""
        for process in self._holders.values():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()  # what tells a holder
        for process in self._holders.values():
            try:
                process.wait(_COMMAND_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._holders.clear()

    def _hold(self) -> None:
        """Start the holders of all hosts and of the switch, and wait until they are set up."""
        names = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
        names += "".join(f"{self.address(host)} host{host}\n" for host in range(self.hosts))
        with tempfile.NamedTemporaryFile("w", prefix="unisono-lab-", suffix=".hosts") as file:
            file.write(names)
            file.flush()
            os.chmod(file.name, 0o644)
            for host in (_SWITCH, *range(self.hosts)):
                name = host if isinstance(host, str) else f"host{host}"
                self._holders[host] = _start_holder(name, file.name)
            for host, process in self._holders.items():
                assert process.stdout is not None
                if process.stdout.readline() != "up\n":
                    raise LabError(f"host {host} of the lab did not come up: see above")
        # The mounted file lives on in the hosts, without a name.

    def _wire(self) -> None:
        """Make bridges, links, addresses and limits."""
        links = [f"link add rail{r} type bridge\nlink set rail{r} up" for r in range(self.rails)]
        limits: list[str] = []
        for host in range(self.hosts):
            pid = self._holders[host].pid
            for rail in range(self.rails):
                port = _port(host, rail)
                links.append(f"link add {port} type veth peer name eth{rail} netns {pid}")
                links.append(f"link set {port} master rail{rail} up")
                limits += self._limits(port, host, rail, "src")
        _batch(self.command(_SWITCH, ["ip"]), links)
        _batch(self.command(_SWITCH, ["tc"]), limits)
        for host in range(self.hosts):
            addresses, limits = list[str](), list[str]()
            for rail in range(self.rails):
                addresses.append(f"addr add {self.address(host, rail)}/24 dev eth{rail}")
                addresses.append(f"link set eth{rail} up")
                addresses += self.shaping.host_lines(f"eth{rail}", self.address(host, rail))
                limits += self._limits(f"eth{rail}", host, rail, "dst", self.delay)
            _batch(self.command(host, ["ip"]), addresses)
            _batch(self.command(host, ["tc"]), limits)
            for setting in self.shaping.settings:
                self.run(host, ["sysctl", "--quiet", "--write", setting])

    def _limits(
        self, interface: str, host: int, rail: int, way: str, delay: str | None = None
    ) -> list[str]:
        """Lines for tc. What leaves a host is limited at its own end, what reaches it at the
        switch's; the delay is added once a way."""
        parent, lines = "root", []
        if (rate := self.rates.get(host, self.rate)) is not None:
            peers = [self.address(other, rail) for other in range(self.hosts) if other != host]
            lines += self.shaping.limits(interface, rate, peers, way)
            parent = "parent 1:1"
        if delay is not None:
            queue = f"netem limit {_QUEUE_PACKETS} delay {delay}"
            lines.append(f"qdisc add dev {interface} {parent} handle 10: {queue}")
        return lines


def _start_holder(name: str, names_file: str) -> subprocess.Popen[str]:
    unshare = ["unshare", "--net", "--mount", "--uts", "--propagation", "private"]
    program = [sys.executable, "-I", "-S", str(Path(holder.__file__)), name, names_file]
    return subprocess.Popen(
        [*unshare, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the owner alone
    )


def _port(host: int, rail: int) -> str:
    """The switch's end of a link."""
    return f"h{host}r{rail}"


def _batch(command: Sequence[str], lines: Sequence[str]) -> None:
    """Have ip or tc do all lines. Raises LabError."""
    try:
        _run([*command, "-batch", "-"], "".join(line + "\n" for line in lines))
    except LabError as error:
        if "qdisc kind is unknown" in str(error):
            raise LabError("a delay needs the kernel's netem (modprobe sch_netem)") from error
        raise


def _run(words: Sequence[str], text: str = "", timeout_s: float = _COMMAND_S) -> str:
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(words)} took more than {timeout_s:g} s") from error
    if done.returncode:
        raise LabError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
