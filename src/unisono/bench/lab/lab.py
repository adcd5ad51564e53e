"""The lab: emulated hosts with links, whose failures can be simulated."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.bench.lab import host_process
from unisono.bench.lab.shaping import Shaping
from unisono.errors import UnisonoError

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
"""Programs that a lab uses beyond those of coreutils, and their Debian packages."""
_SWITCH = "switch"
_COMMAND_S = 20.0
_MOST_HOSTS = 250
_RATE = re.compile(r"(?=.*[1-9])\d+(\.\d+)?([kmgt]i?)?(bit|bps)", re.IGNORECASE)
"""Pattern of a positive rate. Without this check, tc would interpret a negative rate as no
limit."""
_QUEUE_PACKETS = 20_000
"""Queue length of a delayed link in packets, enough for 10 Gbit/s and a delay of 20 ms."""


class LabError(UnisonoError):
    """The lab could not be created, or a command in it failed."""


def reason_unavailable() -> str | None:
    """Returns the reason why this machine cannot have a lab, or None if it can."""
    if os.geteuid() != 0:
        return "the lab needs root, because it creates network namespaces"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"the lab needs the command {tool} (Debian: apt install {package})"
    words = ["unshare", "--net", "--mount", "--uts", "true"]
    attempt = subprocess.run(words, capture_output=True, text=True, check=False)
    if attempt.returncode:
        return f"the lab cannot create namespaces here: {attempt.stderr.strip()}"
    return None


class Lab:
    """Emulated hosts on this machine, as a context manager. Each host has an address on every rail.

    `rate` (in tc's notation: "1gbit", "200mbit") limits every link in both directions; None means
    no limit. `rates` replaces `rate` for some hosts. `shaping` configures how links are limited.
    `delay` ("1ms") is added in each direction between hosts. Host `h` (from 0) has the name
    `host<h>`, and the address `<subnet>.<rail>.<h + 1>` on its interface `eth<rail>`. Labs are
    isolated from each other, even with equal addresses, and from the machine's own network.

    All hosts and links are removed at the end, even if the process that created the lab is killed.
    Raises LabError if a requirement of the lab is missing.

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
            raise ValueError("a lab with fair ports cannot have delays")
        if not 1 <= hosts <= _MOST_HOSTS or not 1 <= rails <= _MOST_HOSTS:
            raise ValueError(
                f"a lab has 1 to {_MOST_HOSTS} hosts and 1 to {_MOST_HOSTS} rails, got "
                f"{hosts} and {rails}"
            )
        for given in (rate, *(rates or {}).values()):
            if given is not None and not _RATE.fullmatch(given):
                raise LabError(f"expected a rate such as 1gbit or 200mbit, got {given!r}")
        self.hosts = hosts
        self.rails = rails
        self.rate = rate
        self.rates = dict(rates or {})
        self.delay = delay
        self.shaping = shaping or Shaping()
        self._subnet = subnet
        self._host_processes: dict[int | str, subprocess.Popen[str]] = {}

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

    # ---- information

    def address(self, host: int, rail: int = 0) -> str:
        """Returns the host's address on this rail."""
        return f"{self._subnet}.{rail}.{host + 1}"

    def host_pid(self, host: int | str) -> int:
        """Returns the pid of the process that keeps the host's namespaces alive."""
        return self._host_processes[host].pid

    def command(self, host: int | str, words: Sequence[str]) -> list[str]:
        """Returns a command line that runs the program `words` on the host, in the current
        directory. The started process becomes this program, without a child process."""
        enter = ["nsenter", f"--target={self.host_pid(host)}", "--net", "--mount", "--uts", "--"]
        return [*enter, "env", f"--chdir={Path.cwd()}", *words]

    def processes(self, host: int) -> list[int]:
        """Returns the pids of all processes on the host."""
        return host_process.members(self._host_processes[host].pid)

    # ---- commands

    def start(
        self, host: int, words: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a process on the host; `options` are those of `subprocess.Popen`."""
        return subprocess.Popen(self.command(host, words), env=env, **options)

    def run(self, host: int | str, words: Sequence[str], timeout_s: float = _COMMAND_S) -> str:
        """Runs a command on the host and waits for its end. Returns its standard output. Raises
        LabError."""
        return _run(self.command(host, words), timeout_s=timeout_s)

    def write_agent(self, path: Path) -> None:
        """Writes a program that launchers can use instead of ssh: `path ADDRESS COMMAND...`."""
        cases = "".join(
            f"{self.address(host)} | host{host}) pid={self._host_processes[host].pid} ;;\n"
            for host in range(self.hosts)
        )
        path.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done # options of ssh\n'
            f'case "$1" in\n{cases}*) echo "no host $1 in the lab" >&2; exit 1 ;;\nesac\nshift\n'
            f"cd {Path.cwd()}\n"
            'exec nsenter --target="$pid" --net --mount --uts -- sh -c "$*"\n'
        )
        path.chmod(0o755)

    # ---- faults

    def cut(self, host: int, rail: int = 0, *, carrier: bool = True) -> None:
        """Cuts a link: all packets are lost without notice.

        If `carrier` is false, the host's interface also reports a lost link, as after a cable is
        pulled.
        """
        self.run(_SWITCH, _cutting(host, rail, carrier))

    def mend(self, host: int, rail: int = 0) -> None:
        """Restores a link that was cut."""
        self.run(_SWITCH, _mending(host, rail))

    def cut_for(self, seconds: float, host: int, rail: int = 0, *, carrier: bool = True) -> None:
        """Cuts a link for some seconds, and restores it. A single process does both, so a busy
        machine hardly lengthens the cut."""
        steps = [_cutting(host, rail, carrier), ["sleep", f"{seconds}"], _mending(host, rail)]
        script = " && ".join(map(shlex.join, steps))
        self.run(_SWITCH, ["sh", "-c", script], _COMMAND_S + seconds)

    def kill(self, host: int) -> None:
        """Kills all processes on the host. The kernel closes their connections, so peers detect the
        loss."""
        host_process.end_members(self._host_processes[host].pid)

    def power_off(self, host: int) -> None:
        """Simulates a power loss: cuts the host's links, then kills its processes."""
        for rail in range(self.rails):
            self.cut(host, rail)
        self.kill(host)

    # ---- start and end

    def up(self) -> None:
        """Creates hosts and links. Raises LabError."""
        if reason := reason_unavailable():
            raise LabError(reason)
        try:
            self._hold()
            self._connect_hosts()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Ends all processes in the lab, and removes the lab. Does not raise."""
        for process in self._host_processes.values():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()  # the host process ends when this pipe is closed
        for process in self._host_processes.values():
            try:
                process.wait(_COMMAND_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._host_processes.clear()

    def _hold(self) -> None:
        """Starts the processes that keep the hosts and the switch alive, and waits until they are
        ready."""
        names = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
        names += "".join(f"{self.address(host)} host{host}\n" for host in range(self.hosts))
        with tempfile.NamedTemporaryFile("w", prefix="unisono-lab-", suffix=".hosts") as file:
            file.write(names)
            file.flush()
            os.chmod(file.name, 0o644)
            for host in (_SWITCH, *range(self.hosts)):
                name = host if isinstance(host, str) else f"host{host}"
                self._host_processes[host] = _start_host_process(name, file.name)
            for host, process in self._host_processes.items():
                assert process.stdout is not None
                if process.stdout.readline() != "up\n":
                    raise LabError(f"host {host} of the lab did not start; see the messages above")
        # The file is deleted here. Hosts can still read it, because they have mounted it.

    def _connect_hosts(self) -> None:
        """Creates bridges, links, addresses and rate limits."""
        links = [f"link add rail{r} type bridge\nlink set rail{r} up" for r in range(self.rails)]
        limits: list[str] = []
        for host in range(self.hosts):
            pid = self._host_processes[host].pid
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
            if self.shaping.settings:
                self.run(host, ["sh", "-c", " && ".join(map(_setting, self.shaping.settings))])

    def _limits(
        self, interface: str, host: int, rail: int, way: str, delay: str | None = None
    ) -> list[str]:
        """Returns commands for tc that limit one interface. A host's interface limits the data that
        the host sends; the switch's interface limits the data that the host receives. The delay is
        added once per direction."""
        parent, lines = "root", []
        if (rate := self.rates.get(host, self.rate)) is not None:
            peers = [self.address(other, rail) for other in range(self.hosts) if other != host]
            lines += self.shaping.limits(interface, rate, peers, way)
            parent = "parent 1:1"
        if delay is not None:
            queue = f"netem limit {_QUEUE_PACKETS} delay {delay}"
            lines.append(f"qdisc add dev {interface} {parent} handle 10: {queue}")
        return lines


def _start_host_process(name: str, names_file: str) -> subprocess.Popen[str]:
    unshare = ["unshare", "--net", "--mount", "--uts", "--propagation", "private"]
    program = [sys.executable, "-I", "-S", str(Path(host_process.__file__)), name, names_file]
    return subprocess.Popen(
        [*unshare, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C does not interrupt the hosts
    )


def _port(host: int, rail: int) -> str:
    """Returns the name of the switch's interface to a host on one rail."""
    return f"h{host}r{rail}"


def _cutting(host: int, rail: int, carrier: bool) -> list[str]:
    return ["ip", "link", "set", _port(host, rail), "nomaster" if carrier else "down"]


def _mending(host: int, rail: int) -> list[str]:
    return ["ip", "link", "set", _port(host, rail), "master", f"rail{rail}", "up"]


def _setting(setting: str) -> str:
    """Returns a shell command that makes a kernel setting, without the program sysctl."""
    name, _, value = setting.partition("=")
    return f"echo {shlex.quote(value)} > /proc/sys/{name.replace('.', '/')}"


def _batch(command: Sequence[str], lines: Sequence[str]) -> None:
    """Runs all lines as commands of ip or tc. Raises LabError."""
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
