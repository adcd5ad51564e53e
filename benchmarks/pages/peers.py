"""The parts of the results about the libraries that `sweep.py --peers` names, and about
one-sided access."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from pages.sweeps import OURS, Sample, render_table, samples_of
from pages.target_rows import HEAD, target_row
from unisono.bench.cases import OPERATIONS
from unisono.bench.contestants import INTEL
from unisono.bench.sizes import format_size

PEERS_PREFIX = "peers-"
"""The beginning of the names of the results files."""
WANTED = {INTEL: 2.0, "openmpi": 3.0, "mpich": 3.0}
"""By library: the target of the geometric mean of its time over ours."""

PUT_SIZES, WANTED_PUT = (8, 1 << 20), 2.0
"""Sizes of a put with a target, and the target of MPI's time over ours."""


def render_peers(documents: list[dict[str, Any]]) -> list[str]:
    """Renders the JSON results of `sweep.py --peers` as Markdown."""
    samples = [sample for document in documents for sample in samples_of(document)]
    samples.sort(key=lambda sample: (sample.ranks, list(OPERATIONS).index(sample.op)))
    documents_peers = dict.fromkeys(peer for d in documents for peer in d["geometric_mean"])
    peers = [name for name in documents_peers if name not in OURS and name != "memory"]
    lines = [*_preface(documents[0], peers), "", *HEAD]
    for peer in peers:
        lines += _targets(samples, peer)
    for ranks in dict.fromkeys(sample.ranks for sample in samples):
        lines += ["", f"{ranks} ranks:", ""]
        lines += render_table([sample for sample in samples if sample.ranks == ranks])
    return lines


def _preface(document: dict[str, Any], peers: list[str]) -> list[str]:
    version = document["machine"]["packages"].get(INTEL)
    lines = [
        f"`python benchmarks/sweep.py --peers {','.join(peers)}`: the same method as above, in",
        "runs of its own.",
    ]
    if version is None:
        return lines
    return [
        *lines,
        f"`impi` is Intel MPI {version} (`impi-rt` from PyPI, in `build/impi`), through mpi4py",
        "with `MPI_THREAD_SINGLE`. Its settings are its defaults and `I_MPI_FABRICS=shm`: it binds",
        "each rank to a core, reads its tuning file `tuning_generic_shm.dat` on AMD's cores, and",
        "its waiting ranks do not sleep.",
    ]


def _targets(samples: list[Sample], peer: str) -> list[str]:
    ratios = {
        f"{sample.op} {format_size(sample.size_bytes)} n={sample.ranks}": ratio
        for sample in samples
        if (ratio := sample.ratio(peer)) is not None
    }
    if not ratios:
        return []
    mean, wanted = geometric_mean(ratios.values()), WANTED.get(peer, 1.0)
    worst = min(ratios, key=ratios.__getitem__)
    behind = [name for name, ratio in ratios.items() if ratio < 1]
    name = f"{peer}'s time over ours, geometric mean of {len(ratios)} rows"
    shown = ", ".join([f"{len(behind)} rows", *behind])
    return [
        target_row(name, f">= {wanted:g}", f"{mean:.2f}", mean >= wanted),
        target_row(
            "the same, worst row", ">= 1", f"{ratios[worst]:.2f} ({worst})", ratios[worst] >= 1
        ),
        target_row(f"rows in which {peer} is faster", "0 rows", shown, not behind),
    ]


def render_puts(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `unisono bench put` as Markdown."""
    samples = list(samples_of(document))
    peers = [name for name in document["geometric_mean"] if name not in OURS and name != "memory"]
    lines = [
        f"`{' '.join(document['command'])}`: every rank writes to the next rank, ours by `put`",
        "with a signal, MPI by `Put` and `Flush`. The memory's limit is one copy.",
        "",
        *HEAD,
    ]
    for sample in samples:
        if sample.size_bytes not in PUT_SIZES:
            continue
        for peer in peers:
            name = f"put of {format_size(sample.size_bytes)}: {peer}'s time over ours"
            ratio = sample.ratio(peer)
            if ratio is None:
                continue  # not installed
            lines.append(
                target_row(name, f">= {WANTED_PUT:g}", f"{ratio:.2f}", ratio >= WANTED_PUT)
            )
    return [*lines, "", *render_table(samples)]
