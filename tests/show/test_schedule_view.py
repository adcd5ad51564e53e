from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

from unisono.algorithms import build, names
from unisono.errors import ScheduleError
from unisono.schedule import Schedule, from_json
from unisono.show import table, view
from unisono.show.document import document
from unisono.types import Op


def broken(schedule: Schedule) -> Schedule:
    """Returns the schedule without its last transfer."""
    return dataclasses.replace(schedule, transfers=schedule.transfers[:-1])


def text_of(schedule: Schedule, *, every: bool = False, nbytes: int | None = None) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table(view(schedule, nbytes=nbytes), every=every))
    return capture.get()


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_facts_of_a_ring(n: int) -> None:
    facts = dict(view(build("all_reduce", "ring", ranks=n), nbytes=n << 20).facts)
    assert facts["rounds"] == str(2 * (n - 1))
    assert facts["a rank sends"] == (f"{2 * (n - 1)} MiB" if n > 1 else "0 B")
    assert facts["links used"] == str(n if n > 1 else 0)


@pytest.mark.parametrize("op", list(Op))
def test_every_view_ends_with_all_chunks_done_and_has_a_summary(op: Op) -> None:
    for name in names(op):
        schedule_view = view(build(op, name, ranks=6, root=5))
        assert schedule_view.problem is None
        assert schedule_view.summary.endswith(".")
        assert schedule_view.source or op is Op.BARRIER
        if schedule_view.rounds:
            assert schedule_view.rounds[-1].done == schedule_view.wanted
            assert [round_.done for round_ in schedule_view.rounds] == sorted(
                round_.done for round_ in schedule_view.rounds
            )


def test_a_wrong_schedule_has_a_problem_in_its_view() -> None:
    schedule_view = view(broken(build("all_reduce", "ring", ranks=4)))
    assert schedule_view.problem is not None and "rank 0, chunk 1, round 5" in schedule_view.problem
    assert schedule_view.rounds[-1].done == schedule_view.wanted - 1
    assert schedule_view.summary == "", "the built-in summary does not describe this schedule"
    assert "WRONG" in text_of(schedule_view.schedule)


def test_transfers_out_of_order_are_refused() -> None:
    schedule = build("all_reduce", "ring", ranks=3)
    with pytest.raises(ScheduleError, match="must be ordered by round"):
        view(dataclasses.replace(schedule, transfers=schedule.transfers[::-1]))


def test_the_table_has_one_row_per_round_and_all_omits_none() -> None:
    short = text_of(build("all_reduce", "ring", ranks=4), nbytes=4 << 20)
    rows = [line for line in short.splitlines() if "0→1" in line and "│" in line]
    assert len(rows) == 6 and "1 MiB" in rows[0] and "16/16" in rows[-1]
    long = build("all_reduce", "ring", ranks=32)
    assert "34 more rounds; --all shows them" in text_of(long)
    whole = text_of(long, every=True)
    assert "--all" not in whole and "31→0: 30+" in whole


def test_a_barrier_has_no_transfers() -> None:
    assert "It has no transfers." in text_of(build("barrier", "direct", ranks=4))


def test_the_document_is_consistent_and_contains_the_schedule() -> None:
    schedule = build("reduce_scatter", "pairwise", ranks=5)
    found = json.loads(json.dumps(document(view(schedule, nbytes=1000))))
    assert from_json(json.dumps(found["schedule"])) == schedule
    assert found["chunk_bytes"] == 200
    for row in found["rounds"]:
        assert row["sent"] == [1] * 5
        assert sum(link["chunks"] for link in row["links"]) == 5
    last = {(w["rank"], w["location"]): w["contributors"] for w in found["rounds"][-1]["writes"]}
    assert last == {(rank, rank): list(range(5)) for rank in range(5)}
