"""Runs `unisono bench`: parses options, runs the benchmark, prints tables and writes files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from unisono.bench import (
    MEMORY,
    NETWORK,
    OURS,
    Case,
    Cluster,
    Contestant,
    Lab,
    Pace,
    parse_sizes,
    read_models,
    render_report,
    require_device,
    run_benchmark,
    save_plot,
    with_predictions,
)
from unisono.commands.bench_options import BenchOptions
from unisono.commands.outputs import progress, result_console, write_json
from unisono.figures import require_plotting
from unisono.simulator import LinkModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The size of a lab for one run, and the number of ranks on each of its hosts."""

    hosts: int
    per_host: int = 1
    rate: str | None = None
    rails: int = 1
    delay: str | None = None

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @contextmanager
    def build(self) -> Iterator[Cluster]:
        """Creates the lab for the duration of a `with` block. Raises LabError."""
        with Lab(hosts=self.hosts, rate=self.rate, rails=self.rails, delay=self.delay) as lab:
            yield Cluster(lab=lab, per_host=self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """The parsed command line. Raises ValueError or UnsupportedError if the request is invalid."""

    ops: tuple[str, ...]
    ranks: int
    sizes: tuple[int, ...]
    dtype: str
    redop: str
    root: int
    ours: str
    against: tuple[str, ...]
    pace: Pace
    bind: bool = False
    hosts: Hosts | None = None
    device: str = ""
    json_path: str | None = None
    plot_path: Path | None = None
    models: tuple[LinkModel, ...] = ()
    """Link models that predict Unisono's times; empty if no predictions are requested."""

    def __post_init__(self) -> None:
        assert self.cases  # constructing the cases validates them
        for name in self.contestants:
            Contestant(name=name, device=self.device)
        if self.plot_path is not None:
            require_plotting()

    @property
    def cases(self) -> list[Case]:
        return [
            Case(
                op=op,
                ranks=self.ranks,
                nbytes=nbytes,
                dtype=self.dtype,
                redop=self.redop,
                root=self.root,
            )
            for op in self.ops
            for nbytes in (self.sizes if op != "barrier" else (0,))
        ]

    @property
    def contestants(self) -> tuple[str, ...]:
        """Names of contestants, with Unisono first and the limit last."""
        limit = MEMORY if self.hosts is None else NETWORK
        return tuple(dict.fromkeys((self.ours, *self.against, limit)))


def read_request(options: BenchOptions) -> BenchRequest:
    """Converts options to a request. Raises ValueError, OSError or UnsupportedError."""
    ops, sizes = split_names(options.op), parse_sizes(options.sizes)
    lab = None
    if options.hosts is not None:
        lab = Hosts(
            hosts=options.hosts,
            per_host=options.per_host,
            rate=options.rate,
            rails=options.rails,
            delay=options.delay,
        )
    rows, budget_s = max(1, len(ops) * len(sizes)), options.time_budget
    row_budget_s = None if budget_s is None else budget_s / rows
    models = options.predict_path
    return BenchRequest(
        ops=ops,
        ranks=options.ranks if lab is None else lab.ranks,
        hosts=lab,
        sizes=sizes,
        dtype=options.dtype,
        redop=options.redop,
        root=options.root,
        device=options.device.of_contestants,
        ours=OURS["torch" if options.device.of_contestants else options.api.value],
        against=split_names(options.against),
        pace=Pace(rounds=options.rounds, round_s=options.round_s, row_budget_s=row_budget_s),
        bind=options.bind,
        json_path=options.json_path,
        plot_path=options.plot_path,
        models=() if models is None else read_models(models, ops),
    )


def execute(request: BenchRequest) -> int:
    """Runs the benchmark and prints and writes its results. Returns the exit code. Raises
    `UnsupportedError` if the machine has no such device."""
    require_device(request.device)
    lab = nullcontext() if request.hosts is None else request.hosts.build()
    with lab as cluster, progress() as observe:
        report = run_benchmark(
            request.cases,
            request.contestants,
            ours=request.ours,
            pace=request.pace,
            bind=request.bind,
            cluster=cluster,
            device=request.device,
            command=(Path(sys.argv[0]).name, *sys.argv[1:]),
            observe=observe,
        )
    if request.models:
        report = with_predictions(report, request.models)
    result_console(request.json_path).print(render_report(report))
    write_json(report.to_dict(), request.json_path)
    if request.plot_path is not None:
        save_plot(report, request.plot_path)
    return int(report.failed)


def split_names(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list of names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
