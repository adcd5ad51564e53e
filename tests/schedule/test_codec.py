from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import build, names
from unisono.errors import ScheduleError
from unisono.schedule import Collective, Schedule, Transfer, from_json, to_json
from unisono.types import Op

numbers = st.integers(0, 1 << 20)
transfers = st.builds(
    Transfer,
    round=numbers,
    src=numbers,
    src_chunk=numbers,
    dst=numbers,
    dst_chunk=numbers,
    count=numbers,
    reduce=st.booleans(),
    channel=numbers,
)


collectives = st.builds(
    lambda op, ranks, parts: Collective(
        op=op, ranks=ranks, parts=parts, root=ranks - 1 if op.rooted else None
    ),
    st.sampled_from(Op),
    st.integers(1, 99),
    st.integers(1, 99),
)
schedules = st.builds(
    Schedule,
    collective=collectives,
    algorithm=st.text(max_size=10),
    transfers=st.lists(transfers, max_size=5).map(tuple),
    scratch=numbers,
)


@given(schedules)
@settings(deadline=None)
def test_any_schedule_survives_a_round_trip(schedule: Schedule) -> None:
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in Op for name in names(op)])
def test_every_algorithm_survives_a_round_trip(op: Op, name: str) -> None:
    schedule = build(op, name, ranks=5, root=3)
    assert from_json(to_json(schedule)) == schedule


def valid() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(to_json(build("broadcast", "direct", ranks=3, root=1)))
    return data


def put(path: list[Any], value: object) -> str:
    """Returns the valid text with one value changed, or removed if the value is `...`."""
    data = valid()
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "schedule: expected an object, got list"),
        ("{}", "schedule: missing algorithm, collective, format, transfers, version"),
        ('{"format": 1, "format": 1}', "format: expected one value, got several"),
        (put(["format"], "msccl"), "format: expected 'unisono-schedule', got 'msccl'"),
        (put(["version"], 2), "version: expected 1, got 2"),
        (put(["version"], True), "version: expected an integer, got bool True"),
        (put(["algorithm"], None), "algorithm: expected a string, got null"),
        (put(["extra"], 1), "schedule: unknown extra"),
        (put(["scratch"], 1.5), "scratch: expected an integer, got float 1.5"),
        (put(["collective"], 3), "collective: expected an object, got int 3"),
        (put(["collective", "op"], "sum"), "collective.op: expected one of all_reduce"),
        (put(["collective", "ranks"], "3"), "collective.ranks: expected an integer, got str '3'"),
        (put(["collective", "ranks"], 0), "broadcast: expected 1..65536 ranks, got 0"),
        (put(["collective", "root"], 7), "expected a root in 0..2, got 7"),
        (put(["collective", "root"], ...), "got None"),
        (put(["collective", "size"], 7), "collective: unknown size"),
        (put(["transfers"], {}), "transfers: expected a list, got dict"),
        (put(["transfers", 1], 5), r"transfers\[1\]: expected an object, got int 5"),
        (put(["transfers", 1, "src"], ...), r"transfers\[1\]: missing src"),
        (
            put(["transfers", 0, "src"], -1),
            r"transfers\[0\].src: expected a number in 0..2147483647, got -1",
        ),
        (
            put(["transfers", 0, "dst"], 1 << 40),
            r"transfers\[0\].dst: expected a number in 0..2147483647, got \d+",
        ),
        (put(["transfers", 0, "round"], True), r"transfers\[0\].round: expected an integer"),
        (put(["transfers", 0, "reduce"], 1), r"transfers\[0\].reduce: expected true or false"),
        (put(["transfers", 0, "from"], 1), r"transfers\[0\]: unknown from"),
    ],
)
def test_errors_of_invalid_text_name_the_place(text: str, error: str) -> None:
    with pytest.raises(ScheduleError, match=error):
        from_json(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
@settings(deadline=None)
def test_any_invalid_value_raises_a_schedule_error(value: object) -> None:
    for path in ([key] for key in valid()):
        try:
            from_json(put(path, value))
        except ScheduleError:
            continue


def test_the_json_has_one_transfer_per_line() -> None:
    lines = to_json(build("broadcast", "direct", ranks=3)).splitlines()
    assert '  {"round": 0, "src": 0, "src_chunk": 0, "dst": 1, "dst_chunk": 0},' in lines
