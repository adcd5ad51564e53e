"""MSCCL++ plans: the reader accepts only correct plans and names the place of errors. Written plans
can be read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases_in_turn import turn
from unisono.algorithms import build, names
from unisono.errors import ScheduleError, UnisonoError, UnsupportedError
from unisono.schedule import Schedule, check, from_mscclpp_json, to_mscclpp_json
from unisono.types import Op

Json = dict[str, Any]
_OPS = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL)
MEMORY = {"channel_type": "memory", "channel_ids": [0]}
NOP = {"name": "nop"}
SIGNAL = {"name": "signal", **MEMORY}
WAIT = {"name": "wait", **MEMORY}


def local(buffer: str, index: int = 0, size: int = 1) -> Json:
    return {"type": buffer, "index": index, "size": size}


def remote(index: int = 0, size: int = 1, buffer: int = 0) -> Json:
    return {"buffer_id": buffer, "index": index, "size": size}


def op(name: str, sources: list[Json], targets: list[Json], **more: Any) -> Json:
    return {"name": name, "src_buff": sources, "dst_buff": targets, **MEMORY, **more}


def plan(
    blocks: Callable[[int], list[list[Json]]],
    *,
    coll: str = "allreduce",
    chunks: tuple[int, int, int] = (1, 1, 2),
    in_place: bool = True,
    ranks: int = 2,
    **gpu_more: Any,
) -> str:
    """Returns a plan in which each rank can reach the next rank's scratch (buffer 0), input (1) and
    output (2).
    """
    gpus = []
    for rank in range(ranks):
        peer = (rank + 1) % ranks
        gpus.append(
            {
                "id": rank,
                "input_chunks": chunks[0],
                "output_chunks": chunks[1],
                "scratch_chunks": chunks[2],
                "threadblocks": [
                    {
                        "id": number,
                        "ops": ops,
                        "channels": [
                            MEMORY,
                            {"channel_type": "switch", "channel_ids": [0]},
                        ],
                        "remote_buffer_refs": [
                            {"access_channel_type": "memory", "remote_buffer_ids": [0, 1, 2]}
                        ],
                    }
                    for number, ops in enumerate(blocks(rank))
                ],
                "channels": [
                    {"channel_type": "memory", "connected_to": [peer]},
                    {
                        "channel_type": "switch",
                        "buff": "i",
                        "rank_groups": [{"size": ranks, "ranks": list(range(ranks))}],
                    },
                ],
                "remote_buffers": [
                    {"rank": peer, "type": b, "access_channel_types": ["memory"]} for b in "sio"
                ],
                **gpu_more,
            }
        )
    head = {"name": "test", "collective": coll, "protocol": "Simple", "inplace": in_place}
    return json.dumps({**head, "gpus": gpus})


def put_and_reduce(rank: int) -> list[list[Json]]:
    """Returns a plan in which each rank puts its input into the other rank's scratch, signals, and
    reduces.
    """
    put = op("put", [local("i")], [remote()])
    reduce = op("re", [local("i"), local("s")], [local("i")])
    return [[put, NOP, SIGNAL, WAIT, NOP, reduce]]


def test_put_and_reduce_is_one_round() -> None:
    schedule = from_mscclpp_json(plan(put_and_reduce))
    check(schedule)
    assert (schedule.num_rounds, schedule.scratch, len(schedule.transfers)) == (1, 0, 2)


def test_packets_need_no_signal() -> None:
    def blocks(rank: int) -> list[list[Json]]:
        put = op("ppkt", [local("i")], [remote()])
        return [[put], [op("repkt", [local("i"), local("s")], [local("i")])]]

    # A second threadblock receives the packet and writes i0. It must also know that the put in the
    # first threadblock has read i0.
    with pytest.raises(ScheduleError, match=r"writes i.0. of gpu ., unordered with the read by"):
        from_mscclpp_json(plan(blocks))
    check(from_mscclpp_json(plan(lambda rank: [[o for b in blocks(rank) for o in b]])))


def test_a_switch_channel_reduces_for_all_gpus() -> None:
    def blocks(rank: int) -> list[list[Json]]:
        synchronise = [NOP, SIGNAL, WAIT, NOP]
        switch = [{"switch_channel_id": 0, "index": rank, "size": 1}]
        return [[*synchronise, op("glres", switch, switch), *synchronise]]

    schedule = from_mscclpp_json(plan(blocks, chunks=(2, 2, 0)))
    check(schedule)
    assert schedule.num_rounds == 2


def test_groups_of_threadblocks_share_chunks() -> None:
    def blocks(rank: int) -> list[list[Json]]:
        def block(number: int) -> list[Json]:
            group = {"tbg_info": {"tb_id": number, "tbg_size": 2}}
            return [
                op("ppkt", [local("i")], [remote()], **group),
                op("repkt", [local("i"), local("s")], [local("i")], **group),
            ]

        return [block(0), block(1)]

    schedule = from_mscclpp_json(plan(blocks))
    check(schedule)
    assert schedule.collective.parts == 2


def test_barriers_semaphores_and_pipelines_order() -> None:
    def blocks(rank: int) -> list[list[Json]]:
        barrier = {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}
        take, give = ({"name": f"sem_{n}", "semaphore_ids": [0]} for n in ("acquire", "release"))
        (put, *rest, reduce) = put_and_reduce(rank)[0]
        inner = {"name": "pipeline", "ops": [put, *rest, give],
                 "iter_context": {"unit_size": 1, "num_chunks": 1}}  # fmt: skip
        return [[inner, barrier], [take, NOP, reduce, barrier]]

    semaphores = [{"init_value": 0}]
    check(from_mscclpp_json(plan(blocks, semaphores=semaphores)))
    # A semaphore that has a token at the start does not order the two threadblocks.
    with pytest.raises(ScheduleError, match=r"a race|which is empty"):
        from_mscclpp_json(plan(lambda r: blocks(r)[::-1], semaphores=[{"init_value": 1}]))


def drop(at: int) -> Callable[[int], list[list[Json]]]:
    return lambda rank: [[o for i, o in enumerate(put_and_reduce(rank)[0]) if i != at]]


def only(*ops: Json, **more: Any) -> str:
    return plan(lambda rank: [list(ops)], **more)


PUT = op("put", [local("i")], [remote()])
WRONG = {
    "no nop before the signal": (plan(drop(1)), r"op 4 \(re\) reads s.0. of gpu ., unordered"),
    "no nop after the wait": (plan(drop(4)), r"op 4 \(re\) reads s.0. of gpu ., unordered"),
    "no signal": (
        plan(drop(2)),
        r"deadlock: gpu 0, threadblock 0, op 2 \(wait\) waits for a signal from gpu 1 on memory",
    ),
    "no packet": (
        only(op("repkt", [local("i"), local("s")], [local("i")])),
        "deadlock: .* waits for a packet in s.0. of gpu 0",
    ),
    "lost": (only(PUT), "o.0. of gpu 0 lacks the contribution of gpu 1 at the end"),
    "a lone barrier": (
        only({"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}),
        "waits for 1 more threadblocks at barrier 0",
    ),
    "a semaphore that is not there": (
        only({"name": "sem_acquire", "semaphore_ids": [3]}),
        "expected a semaphore of the plan, got number 3",
    ),
    "a buffer that is not there": (
        only(op("put", [local("i")], [remote(buffer=9)])),
        "below 3, got 9",
    ),
    "outside": (only(op("put", [local("i", 5)], [remote()])), r"needs i\[5:6\] of gpu 0"),
    "different lengths": (
        only(op("put", [local("i")], [remote(0, 2)])),
        r"needs ranges of one length, got \[1, 2\] chunks",
    ),
    "no source": (only(op("put", [], [remote()])), "needs at least one source and one target"),
    "not a multiple": (
        plan(put_and_reduce, coll="allgather"),
        "expected a multiple of 2 chunks, got 1",
    ),
    "not JSON": ("{", "not JSON"),
    "not a plan": ("[]", "plan: expected an object, got list"),
    "nobody": ('{"gpus": []}', "plan.gpus: expected at least one gpu"),
    "no name": (plan(put_and_reduce).replace('"name": "test"', '"nam": 1'), "plan: missing name"),
    "a strange buffer": (only(op("put", [local("x")], [remote()])), "expected i, o or s"),
    "a negative number": (only(op("put", [local("i", -1)], [remote()])), "expected a number"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_of_wrong_plans_name_the_place(what: str) -> None:
    text, pattern = WRONG[what]
    with pytest.raises(ScheduleError) as caught:
        from_mscclpp_json(text)
    assert re.search(pattern, str(caught.value)), str(caught.value)


def test_errors_name_unsupported_operations() -> None:
    with pytest.raises(UnsupportedError, match=r"threadblock 0, op 0 \(gstorepkt\)"):
        from_mscclpp_json(only({"name": "gstorepkt"}))
    with pytest.raises(UnsupportedError, match="older plan format"):
        from_mscclpp_json('{"gpus": [{"inputChunks": 1}]}')
    with pytest.raises(UnsupportedError, match="unsupported operation 'sendrecv'"):
        from_mscclpp_json(plan(put_and_reduce, coll="sendrecv"))
    with pytest.raises(UnsupportedError, match="cannot express broadcast"):
        to_mscclpp_json(build("broadcast", "direct", ranks=2))


@pytest.mark.parametrize(("op_", "name"), [(o, name) for o in _OPS for name in names(o)])
def test_written_files_are_read_back(op_: Op, name: str) -> None:
    for ranks in (1, 2, 3, 4):
        with turn(ranks=ranks):
            comes_back(build(op_, name, ranks=ranks))


def comes_back(before: Schedule) -> None:
    after = from_mscclpp_json(to_mscclpp_json(before))
    check(after)
    assert after.collective == before.collective
    assert after.num_rounds <= before.num_rounds
    for rank in range(before.collective.ranks):
        assert after.chunks_sent(rank) == before.chunks_sent(rank)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_plan_is_rejected_or_still_correct(data: st.DataObject) -> None:
    document = json.loads(to_mscclpp_json(build("all_reduce", "ring", ranks=3)))
    ops = data.draw(st.sampled_from(document["gpus"]))["threadblocks"][0]["ops"]
    at = data.draw(st.integers(0, len(ops) - 1))
    if data.draw(st.booleans()):
        del ops[at]
    else:
        other = data.draw(st.integers(0, len(ops) - 1))
        ops[at], ops[other] = ops[other], ops[at]
    try:
        schedule = from_mscclpp_json(json.dumps(document))
    except UnisonoError as error:
        assert "gpu" in str(error)
    else:
        check(schedule)
