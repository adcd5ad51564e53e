"""The command `unisono lab`, which creates several hosts on one machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Annotated

import typer

from unisono.commands.bench_options import DelayOption, RailsOption, RateOption
from unisono.commands.outputs import JsonOption, result_console, write_json

if TYPE_CHECKING:
    from unisono.bench import Lab


def lab(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Command to run on every host; {I} becomes the host's number."),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, max=250, help="Hosts.")] = 2,
    rate: RateOption = None,
    rails: RailsOption = 1,
    delay: DelayOption = None,
    json_path: JsonOption = None,
) -> None:
    """Create hosts out of network namespaces of this machine, and run a command on each (needs
    root).

    Without a command, the hosts stay until Ctrl-C, and the lab prints how to enter them. The exit
    code is the first one that is not 0. When the command ends, the lab ends with all its processes.
    """
    from unisono.bench import Lab

    with Lab(hosts=hosts, rate=rate, rails=rails, delay=delay) as made:
        description = _describe(made)
        write_json({"hosts": description}, json_path)
        if command:
            raise typer.Exit(_run_everywhere(made, command))
        console = result_console(json_path)
        for host in description:
            console.print(f"{host['name']}  {', '.join(host['addresses'])}", highlight=False)
            console.print(f"  {' '.join(host['enter'])} bash", highlight=False, soft_wrap=True)
        console.print("Ctrl-C ends the lab.")
        _wait_for_interrupt()


def _describe(made: Lab) -> list[dict[str, list[str] | str]]:
    return [
        {
            "name": f"host{host}",
            "addresses": [made.address(host, rail) for rail in range(made.rails)],
            "enter": made.command(host, []),
        }
        for host in range(made.hosts)
    ]


def _run_everywhere(made: Lab, command: list[str]) -> int:
    """Runs a command on every host. Returns the first exit code other than 0, in the order of
    hosts."""
    processes, readers = [], []
    for host in range(made.hosts):
        words = [word.replace("{I}", str(host)) for word in command]
        process = made.start(
            host, words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_forward_output, args=(process.stdout, f"[host{host}] "))
        reader.start()
        processes.append(process)
        readers.append(reader)
    codes = [process.wait() for process in processes]
    for host in range(made.hosts):
        made.kill(host)  # ends background processes, which would keep the output open
    for reader in readers:
        reader.join()
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _forward_output(stream: IO[str], prefix: str) -> None:
    with stream, suppress(BrokenPipeError):  # stops if standard output is closed
        for line in stream:
            sys.stdout.write(prefix + line)
            sys.stdout.flush()


def _wait_for_interrupt() -> None:
    try:
        signal.pause()
    except KeyboardInterrupt:
        return
