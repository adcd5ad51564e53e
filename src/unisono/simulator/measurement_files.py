"""Reads measured times: files of `unisono bench` and `unisono tune`, and output of nccl-tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unisono.types import Op

_ROW = re.compile(r"\s*(\d+)\s+\d+\s+[a-z]\w*\s+\S+\s+-?\d+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s")
_RANK = re.compile(r"#\s+Rank\s+\d+\s", re.IGNORECASE)
_TEST = re.compile(r"#.*?\b([a-z_]+?)_perf\b")
_NAMES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
_WHOLE_SPREAD = 2.0
"""Approximate ratio of the interquartile range of seven rounds to the error of their median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured time: the seconds of an operation. `nbytes` is the size of a rank's input or
    output buffer, whichever is larger."""

    op: str
    ranks: int
    nbytes: float
    seconds: float
    contestant: str = ""
    noise: float = 0.0
    """Relative error of the time."""
    algorithm: str = ""
    """The algorithm that ran, if known."""


def read(text: str, *, op: Op | str | None = None) -> list[Sample]:
    """Reads the samples in the text of a file of any supported kind. `op` is needed only for
    nccl-tests output that does not contain the name of the test.

    Raises `ValueError` for any other text.

    >>> from textwrap import dedent
    >>> found = read(dedent('''
    ...     # all_reduce_perf -b 8M -e 16M -f 2 -g 2
    ...     #  Rank  0 Group  0 Pid   7 on  node device  0 [0x07] NVIDIA A100
    ...     #  Rank  1 Group  0 Pid   7 on  node device  1 [0x0f] NVIDIA A100
    ...      8388608  2097152   float   sum   -1    86.90   96.53   96.53   0   87.36  96.0  96.0  0
    ... '''))
    >>> found[0].op, found[0].ranks, found[0].nbytes, f"{found[0].seconds * 1e6:.1f} us"
    ('all_reduce', 2, 8388608.0, '86.9 us')
    """
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ValueError(f"invalid JSON: {error}") from error
        try:
            found = list(_of_tune(document) if "measured" in document else _of_bench(document))
        except (KeyError, TypeError, AttributeError) as error:
            detail = f"a row lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"this JSON is damaged: {detail}") from error
        return [sample for sample in found if op is None or sample.op == op]
    return _of_nccl_tests(text, op)


def _of_bench(document: dict[str, Any]) -> Iterator[Sample]:
    rows = document.get("rows")
    if not isinstance(rows, list):
        raise ValueError(
            "expected JSON of `unisono bench --json` or `unisono tune`; this JSON has "
            "neither `rows` nor `measured`"
        )
    for row in rows:
        for name, result in row["results"].items():
            time_s, spread_s = result.get("time_s"), result.get("spread_s")
            if not time_s or row["ranks"] < 2 or row["op"] not in list(Op):
                continue
            yield Sample(
                op=row["op"],
                ranks=row["ranks"],
                nbytes=float(row["size_bytes"]),
                seconds=time_s,
                contestant=name,
                noise=(spread_s[1] - spread_s[0]) / time_s / _WHOLE_SPREAD if spread_s else 0.0,
            )


def _of_tune(document: dict[str, Any]) -> Iterator[Sample]:
    """Yields the samples of a selection file with measurements, or of `unisono tune --json`."""
    for row in document["measured"]:
        if row["ranks"] < 2 or "block_bytes" in row["algorithm"]:
            continue  # measurements with another block size are skipped
        yield Sample(
            op=row["op"],
            ranks=row["ranks"],
            nbytes=float(row["nbytes"]),
            seconds=row["time_s"],
            contestant="unisono",
            algorithm=row["algorithm"],
        )


def _of_nccl_tests(text: str, op: Op | str | None) -> list[Sample]:
    lines = text.splitlines()
    rows = [match for line in lines if (match := _ROW.match(line + " "))]
    if not rows:
        raise ValueError(
            "expected JSON of `unisono bench` or `unisono tune`, or output of "
            "nccl-tests; found no line with a size, a count, a type, a reduction, a "
            "root, and times"
        )
    ranks = sum(1 for line in lines if _RANK.match(line))
    if ranks < 2:
        raise ValueError(
            f"expected nccl-tests output of at least 2 ranks, found {ranks} lines `#  Rank  0 ...`"
        )
    test_name = next((match[1] for line in lines if (match := _TEST.search(line))), None)
    name = str(op or _NAMES.get(str(test_name), test_name))
    if name not in list(Op):
        raise ValueError(
            f"cannot recognise the operation of this nccl-tests output (found {test_name}); pass op"
        )
    return [
        Sample(
            op=name,
            ranks=ranks,
            nbytes=float(match[1]),
            seconds=float(match[2]) * 1e-6,
            contestant="nccl",
        )
        for match in rows
        if float(match[1]) > 0 and float(match[2]) > 0
    ]
