"""Writer of MSCCL++ execution plans, in which a rank reads all operands of a round before it
writes.

Each rank has one threadblock. In each round the rank gets its operands from other ranks' memory
into scratch. All ranks synchronise. Then the rank copies or reduces the operands into their
destinations. All ranks synchronise again. So every read of a round precedes every write, as a
schedule demands.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

from unisono.errors import UnsupportedError
from unisono.schedule.coarsen import Move, moves_of
from unisono.schedule.dataflow import trace
from unisono.schedule.formats.buffers import Buffer, operation_name
from unisono.schedule.formats.msccl_writer import BufferChunk, BufferChunks
from unisono.schedule.schedule import Schedule
from unisono.types import Op

Json: TypeAlias = dict[str, Any]

_CARRIED = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL)


def to_mscclpp_json(schedule: Schedule) -> str:
    """Returns the schedule as a plan that `from_mscclpp_json` and MSCCL++ read.

    Raises `UnsupportedError` for operations other than all_reduce, all_gather, reduce_scatter and
    all_to_all, and `ScheduleError` for a wrong schedule.

    >>> import json
    >>> from unisono.schedule import Builder, Collective
    >>> b = Builder(Collective(op=Op.ALL_REDUCE, ranks=2), "one_shot")
    >>> b.reduce(0, 0, 1)
    >>> b.reduce(1, 0, 0)
    >>> plan = json.loads(to_mscclpp_json(b.build()))
    >>> plan["collective"], len(plan["gpus"])
    ('allreduce', 2)
    """
    op = schedule.collective.op
    if op not in _CARRIED:
        known = ", ".join(_CARRIED)
        raise UnsupportedError(f"MSCCL++ plans cannot express {op}; expected one of {known}")
    trace(schedule)
    writer = _PlanWriter(schedule)
    plan = {
        "name": schedule.algorithm,
        "collective": operation_name(op),
        "protocol": "Simple",
        "inplace": op is not Op.ALL_TO_ALL,
        "reuse_resources": False,
        "gpus": [writer.gpu(rank) for rank in range(schedule.collective.ranks)],
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": (1 << 64) - 1,
    }
    return json.dumps(plan, indent=1) + "\n"


class _PlanWriter:
    def __init__(self, schedule: Schedule) -> None:
        self.collective = schedule.collective
        self.places = BufferChunks(schedule.collective, schedule.scratch)
        self.rounds = [list(r) for _, r in groupby(sorted(moves_of(schedule)), itemgetter(0))]
        self.staged = [0] * self.collective.ranks

    def gpu(self, rank: int) -> Json:
        """Returns the section of one rank in the plan."""
        collective = self.collective
        peers = [r for r in range(collective.ranks) if r != rank]
        ops: list[Json] = []
        if collective.op is Op.ALL_TO_ALL:
            own, parts = rank * collective.parts, collective.parts
            ops.append(_op("copy", [_local(BufferChunk(Buffer.INPUT, own), parts)],
                           [_local(BufferChunk(Buffer.OUTPUT, own), parts)]))  # fmt: skip
        for moves in self.rounds:
            ops += self._round(rank, [m for m in moves if m.dst == rank], peers)
        sizes = [
            collective.input_pieces(rank) * collective.parts,
            collective.output_pieces(rank) * collective.parts,
            self.places.size(rank, Buffer.SCRATCH) + self.staged[rank],
        ]
        remote = [{"rank": p, "type": b, "access_channel_types": ["memory"]}
                  for p in peers for b in Buffer]  # fmt: skip
        block = {
            "id": 0,
            "ops": ops,
            "channels": [{"channel_type": "memory", "channel_ids": list(range(len(peers)))}],
            "remote_buffer_refs": [
                {"access_channel_type": "memory", "remote_buffer_ids": list(range(len(remote)))}
            ],
        }
        return {
            "id": rank,
            **dict(zip(("input_chunks", "output_chunks", "scratch_chunks"), sizes, strict=True)),
            "threadblocks": [block],
            "channels": [{"channel_type": "memory", "connected_to": peers}],
            "remote_buffers": remote,
            "semaphores": [],
        }

    def _round(self, rank: int, moves: Sequence[Move], peers: list[int]) -> list[Json]:
        fetched = {m: self._new_stage(rank) for m in moves if m.src != rank}
        gets = [
            _op("get", [self._remote(m, peers)], [_local(stage)], channel_type="memory",
                channel_ids=[peers.index(m.src)])
            for m, stage in fetched.items()
        ]  # fmt: skip
        writes = []
        for m in moves:
            source = fetched.get(m, self.places.of(m.src, m.src_chunk))
            target = self.places.of(rank, m.dst_chunk)
            if m.reduce:
                writes.append(_op("re", [_local(target), _local(source)], [_local(target)],
                                  reduce_op="sum"))  # fmt: skip
            else:
                writes.append(_op("copy", [_local(source)], [_local(target)]))
        return [*self._synchronise(peers), *gets, *self._synchronise(peers), *writes]

    def _synchronise(self, peers: list[int]) -> list[Json]:
        channels = {"channel_ids": list(range(len(peers))), "channel_type": "memory"}
        return [{"name": "nop"}, {"name": "signal", **channels}, {"name": "wait", **channels},
                {"name": "nop"}]  # fmt: skip

    def _new_stage(self, rank: int) -> BufferChunk:
        self.staged[rank] += 1
        return BufferChunk(
            Buffer.SCRATCH, self.places.size(rank, Buffer.SCRATCH) + self.staged[rank] - 1
        )

    def _remote(self, m: Move, peers: list[int]) -> Json:
        place = self.places.of(m.src, m.src_chunk)
        number = peers.index(m.src) * len(Buffer) + list(Buffer).index(place.buffer)
        return {"buffer_id": number, "index": place.chunk, "size": 1}


def _local(place: BufferChunk, size: int = 1) -> Json:
    return {"type": place.buffer, "index": place.chunk, "size": size}


def _op(name: str, sources: list[Json], targets: list[Json], **more: Any) -> Json:
    return {"name": name, "src_buff": sources, "dst_buff": targets, **more}
