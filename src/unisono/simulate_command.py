"""The command `unisono simulate`: options only, fast to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.bench.commands import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.simulator import Conditions, Progress
    from unisono.simulator.compare import Entry
    from unisono.topology import Topology

_BINS = 192


def simulate(
    *,
    op: Annotated[str, typer.Argument(metavar="OPERATION", help="Such as all_reduce.")],
    algorithm: Annotated[
        str | None, typer.Argument(help="Such as ring; left out, --compare says which.")
    ] = None,
    topology_spec: Annotated[
        str, typer.Option("--topology", "-t", metavar="SPEC|FILE", help="As for `unisono topo`.")
    ],
    size: Annotated[str, typer.Option(help="N: bytes of a rank's whole vector.")] = "64M",
    names: Annotated[
        str, typer.Option("--compare", metavar="all|NAMES", help="Algorithms, with semicolons.")
    ] = "all",
    levels: Annotated[
        str | None, typer.Option(metavar="4x8", help="Sizes of groups, innermost first.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes of the picture of --svg.")] = "1K:1G:x8",
    svg_path: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Times against sizes.")
    ] = None,
    heat_path: Annotated[
        Path | None, typer.Option("--heat", metavar="FILE", help="Links over time (SVG).")
    ] = None,
    trace_path: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="For Perfetto or Chrome.")
    ] = None,
    overhead: Annotated[
        float, typer.Option(help="Seconds before each message leaves its rank.")
    ] = 0.0,
    failed: Annotated[
        str, typer.Option(metavar="LINK,...", help="Directed links that are gone, by id.")
    ] = "",
    degraded: Annotated[
        str, typer.Option(metavar="LINK=PART,...", help="Links with a part of their rate left.")
    ] = "",
    in_network: Annotated[
        bool, typer.Option("--in-network", help="Switches that can reduce and copy do so.")
    ] = False,
    paths: Annotated[int, typer.Option(min=1, help="Ways that a message is spread over.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the choice among equal ways.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Run the schedules of an operation on a network that need not exist.

    Prints the league table: time, bandwidths in nccl-tests' terms, the busiest link, and how near
    the time is to the bound of the network's bandwidths, which no algorithm can beat. --trace and
    --heat are of the algorithm that is given, else of the fastest.
    """
    from unisono.bench.execute import result_console, write_json
    from unisono.bench.sizes import parse_size
    from unisono.simulator.bound import bound_s
    from unisono.topology import load
    from unisono.types import Op

    try:
        if op not in list(Op):
            raise ValueError(f"{op} is none of the operations {', '.join(Op)}")
        topology, nbytes = load(topology_spec), parse_size(size)
        run = _Run(
            op,
            topology,
            _names(algorithm, names),
            _levels(levels),
            _conditions(overhead, failed, degraded, in_network, paths, seed),
        )
        for path in (svg_path, heat_path):
            if path is not None and path.suffix != ".svg":
                raise ValueError(f"{path}: the name of this file must end in .svg")
        with _progress() as told:
            entries = run.compare(nbytes, told)
            best = next((entry for entry in entries if entry.result is not None), None)
            if best is None:
                raise ValueError("; ".join(entry.reason for entry in entries))
            files = [*run.pictures(best, nbytes, heat_path, trace_path, told)]
            if svg_path is not None:
                files.append((svg_path, run.chart(sizes, told)))
        bound = bound_s(op, topology, nbytes, in_network=in_network)
        for path, text in files:
            path.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(json_path)
    console.print(_table(op, topology, nbytes, entries, bound))
    if algorithm is not None:
        _tell(console.print, best)
    for entry in entries:
        if entry.result is None and names != "all":
            console.print(f"left out: {entry.algorithm}: {entry.reason}", highlight=False)
    for path, _ in files:
        console.print(f"written: {path}", style="dim", highlight=False, soft_wrap=True)
    write_json(_document(op, topology, nbytes, entries, bound), json_path)


class _Run:
    """What is simulated, whatever the size."""

    def __init__(
        self,
        op: str,
        topology: Topology,
        names: list[str] | None,
        levels: tuple[int, ...] | None,
        conditions: Conditions,
    ) -> None:
        self.op, self.topology, self.names = op, topology, names
        self.levels, self.conditions = levels, conditions

    def compare(self, nbytes: float, told: Callable[[str, Progress], None]) -> list[Entry]:
        from unisono.simulator.compare import compare

        return compare(
            self.op,
            self.topology,
            nbytes,
            names=self.names,
            levels=self.levels,
            conditions=self.conditions,
            progress=told,
        )

    def pictures(
        self,
        best: Entry,
        nbytes: float,
        heat_path: Path | None,
        trace_path: Path | None,
        told: Callable[[str, Progress], None],
    ) -> Iterator[tuple[Path, str]]:
        from unisono.show.simulation import heat
        from unisono.simulator import simulate as run
        from unisono.simulator.trace import to_chrome_trace

        assert best.schedule is not None and best.result is not None, "it was simulated"
        if heat_path is not None:
            result = run(
                best.schedule, self.topology, nbytes, conditions=self.conditions, bins=_BINS
            )
            yield heat_path, heat(result, f"{self.op} by {best.algorithm} on {self.topology.name}")
        if trace_path is not None:
            yield trace_path, to_chrome_trace(best.result)

    def chart(self, sizes: str, told: Callable[[str, Progress], None]) -> str:
        from unisono.bench.sizes import parse_sizes
        from unisono.show.simulation import chart

        lines: dict[str, list[tuple[float, float]]] = {}
        for nbytes in parse_sizes(sizes):
            for entry in self.compare(nbytes, told):
                if entry.result is not None and entry.result.time_s > 0:
                    lines.setdefault(entry.algorithm, []).append((nbytes, entry.result.time_s))
        return chart(f"{self.op} on {self.topology.name}", lines)


def _names(algorithm: str | None, names: str) -> list[str] | None:
    if algorithm is not None:
        return [algorithm]
    # Commas are inside names (`swing:dims=4x4,ports=4`), but most names have none.
    cut = names.split(";" if ";" in names or ":" in names else ",")
    return None if names == "all" else [name.strip() for name in cut if name.strip()]


def _levels(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise ValueError(f"--levels {text}: sizes are written as in 4x8") from None


def _conditions(
    overhead: float, failed: str, degraded: str, in_network: bool, paths: int, seed: int
) -> Conditions:
    from unisono.simulator import Conditions, Endpoint

    try:
        gone = tuple(int(link) for link in failed.split(",") if link)
        pairs = [word.split("=") for word in degraded.split(",") if word]
        slow = {int(link): float(part) for link, part in pairs}
    except ValueError:
        raise ValueError("links are ids: --failed 3,4 --degraded 5=0.5") from None
    return Conditions(
        endpoint=Endpoint(overhead_s=overhead),
        failed=gone,
        degraded=slow,
        in_network=in_network,
        paths=paths,
        seed=seed,
    )


@contextmanager
def _progress() -> Iterator[Callable[[str, Progress], None]]:
    from unisono.bench.execute import progress

    with progress() as show:
        yield lambda name, at: show(name, at.done / max(1, at.total))


def _table(op: str, topology: Topology, nbytes: float, entries: list[Entry], bound: float) -> Table:
    from rich.table import Table

    from unisono.show.network.facts import rate_text
    from unisono.show.simulation.words import bytes_text, time_text

    title = f"{op} of {bytes_text(nbytes)} on {topology.name}, {topology.num_ranks} ranks"
    table = Table(title=title, title_justify="left")
    for name in ("algorithm", "time", "algbw", "busbw", "busiest link", "of it", "of the bound"):
        table.add_column(name, justify="left" if name in ("algorithm", "busiest link") else "right")
    for entry in entries:
        result = entry.result
        if result is None:
            continue
        link = result.busiest_link
        table.add_row(
            entry.algorithm,
            time_text(result.time_s),
            rate_text(result.algbw_Bps(nbytes)),
            rate_text(result.algbw_Bps(nbytes) * _bus_factor(op, topology.num_ranks)),
            result.link_name(link) if link >= 0 else "",
            f"{result.utilisation[link]:.0%}" if link >= 0 else "",
            f"{bound / result.time_s:.0%}" if result.time_s else "",
        )
    table.caption = f"bound: {time_text(bound)}" if bound else None
    return table


def _bus_factor(op: str, ranks: int) -> float:
    from unisono.bench.cases import OPERATIONS

    return OPERATIONS[op].bus_factor(ranks) if op in OPERATIONS else 1.0


def _tell(show: Callable[[str], None], entry: Entry) -> None:
    """The critical path in words."""
    from unisono.show.simulation.words import bytes_text, time_text
    from unisono.simulator import Kind

    assert entry.result is not None, "it was simulated"
    path = entry.result.critical_path()
    show(f"critical path: {len(path)} steps; the last of them:")
    for step in path[-4:]:
        what = (
            f"rank {step.src} to rank {step.dst}"
            if step.kind is Kind.MESSAGE
            else (f"{step.kind.name.lower()} at rank {step.src}")
        )
        took = f"{time_text(step.begun_s)} to {time_text(step.arrived_s)}"
        show(f"  round {step.round}: {what}, {bytes_text(step.bytes)}, {took}")


def _document(
    op: str, topology: Topology, nbytes: float, entries: list[Entry], bound: float
) -> dict[str, Any]:
    factor = _bus_factor(op, topology.num_ranks)
    rows: list[dict[str, Any]] = []
    for entry in entries:
        result = entry.result
        if result is None:
            rows.append({"algorithm": entry.algorithm, "reason": entry.reason})
            continue
        link = result.busiest_link
        rows.append(
            {
                "algorithm": entry.algorithm,
                "time_s": result.time_s,
                "algbw_Bps": result.algbw_Bps(nbytes),
                "busbw_Bps": result.algbw_Bps(nbytes) * factor,
                "busiest_link": link,
                "busiest_link_name": result.link_name(link) if link >= 0 else "",
                "busiest_link_utilisation": float(result.utilisation[link]) if link >= 0 else 0.0,
                "messages": len(result.steps.messages()),
            }
        )
    return {
        "op": op,
        "topology": topology.name,
        "ranks": topology.num_ranks,
        "nbytes": nbytes,
        "bound_s": bound,
        "algorithms": rows,
    }
