"""Writer of MSCCL XML, which converts transfers to steps of threadblocks, ordered by dependences.

Each rank's locations become chunks of its input, output and scratch buffers. The program is in
place, except for alltoall. A connection carries at most one message in a round. A second message
uses another channel. In each round, a GPU sends before it writes. So every step waits only for
steps of earlier rounds, or for reads of the same round. The program cannot deadlock, even if a
connection has room for only one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape  # xml.sax.saxutils imports many other modules
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from unisono.schedule.coarsen import Move, moves_of
from unisono.schedule.collective import Collective
from unisono.schedule.dataflow import trace
from unisono.schedule.formats.buffers import Buffer, operation_name, pieces
from unisono.schedule.schedule import Schedule
from unisono.types import Op

_OUTPUT_FIRST = (Op.ALL_GATHER, Op.GATHER, Op.ALL_TO_ALL)


def to_msccl_xml(schedule: Schedule) -> str:
    """Returns the schedule as MSCCL XML, which `from_msccl_xml`, MSCCL and RCCL read.

    The writer does not check a GPU runtime's limits on threadblocks, channels and steps. Raises
    `UnsupportedError` for a barrier, and `ScheduleError` for a wrong schedule.

    >>> from unisono.schedule import Builder, Collective
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> "nchunksperloop" in to_msccl_xml(b.build())
    True
    """
    name = operation_name(schedule.collective.op)
    trace(schedule)  # rejects a wrong schedule, which could give an invalid program
    return _xml(schedule, name, _ProgramWriter(schedule).gpus)


class BufferChunk(NamedTuple):
    """One chunk of one buffer of a GPU."""

    buffer: Buffer
    chunk: int


class BufferChunks:
    """The buffer chunk that stores each location of each rank."""

    def __init__(self, collective: Collective, scratch: int) -> None:
        self._ranks = [self._of(collective, scratch, rank) for rank in range(collective.ranks)]

    def of(self, rank: int, location: int) -> BufferChunk:
        """Returns the buffer chunk of a rank's location."""
        return self._ranks[rank][location]

    def size(self, rank: int, buffer: Buffer) -> int:
        """Returns the number of chunks in a rank's buffer, up to the last chunk with a location."""
        return max((p.chunk + 1 for p in self._ranks[rank] if p.buffer is buffer), default=0)

    def _of(self, collective: Collective, scratch: int, rank: int) -> list[BufferChunk]:
        finds = [(Buffer.INPUT, collective.input_ref), (Buffer.OUTPUT, collective.output_ref)]
        if collective.op in _OUTPUT_FIRST:
            finds.reverse()
        places = []
        own = 0
        for location in range(collective.num_chunks + scratch):
            found = None
            if location < collective.num_chunks:
                refs = ((buffer, find(rank, location)) for buffer, find in finds)
                found = next(((b, r) for b, r in refs if r is not None), None)
            if found is None:
                places.append(BufferChunk(Buffer.SCRATCH, own))
                own += 1
            else:
                buffer, (piece, part) = found
                places.append(BufferChunk(buffer, piece * collective.parts + part))
        return places


@dataclass(slots=True, eq=False, kw_only=True)
class _Step:
    block: _Threadblock
    number: int
    type: str
    src: BufferChunk
    dst: BufferChunk
    chunks: int
    waits_for: _Step | None = None
    has_dependents: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class _Threadblock:
    send: int
    receive: int
    channel: int
    steps: list[_Step] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    """For the `id` of each other threadblock: the number of its last step that this threadblock has
    waited for."""

    def add(
        self, kind: str, src: BufferChunk, dst: BufferChunk, count: int, needs: Iterable[_Step]
    ) -> _Step:
        """Adds a step that waits for the steps in `needs`. Each wait except the last uses a `nop`
        step.
        """
        latest: dict[int, _Step] = {}
        for need in needs:
            if need.block is not self and self.seen.get(id(need.block), -1) < need.number:
                known = latest.get(id(need.block))
                if known is None or known.number < need.number:
                    latest[id(need.block)] = need
        waits = list(latest.values())
        for need in waits:
            need.has_dependents = True
            self.seen[id(need.block)] = need.number
        for need in waits[:-1]:
            self._append(
                "nop", BufferChunk(Buffer.INPUT, -1), BufferChunk(Buffer.OUTPUT, -1), 0, need
            )
        return self._append(kind, src, dst, count, waits[-1] if waits else None)

    def _append(
        self, kind: str, src: BufferChunk, dst: BufferChunk, count: int, waits_for: _Step | None
    ) -> _Step:
        step = _Step(
            block=self,
            number=len(self.steps),
            type=kind,
            src=src,
            dst=dst,
            chunks=count,
            waits_for=waits_for,
        )
        self.steps.append(step)
        return step


@dataclass(slots=True, kw_only=True)
class _GpuProgram:
    sizes: dict[Buffer, int]
    blocks: dict[tuple[int, int, int], _Threadblock] = field(default_factory=dict)
    writer: dict[BufferChunk, _Step] = field(default_factory=dict)
    readers: dict[BufferChunk, list[_Step]] = field(default_factory=dict)

    def block(self, send: int, receive: int, channel: int) -> _Threadblock:
        """Returns the threadblock with these peers. The first call creates the threadblock."""
        key = (send, receive, channel)
        if key not in self.blocks:
            self.blocks[key] = _Threadblock(send=send, receive=receive, channel=channel)
        return self.blocks[key]

    def add(
        self,
        block: _Threadblock,
        kind: str,
        src: BufferChunk,
        dst: BufferChunk,
        count: int,
        *,
        reads: BufferChunk | None = None,
        writes: BufferChunk | None = None,
    ) -> None:
        """Adds a step that waits for all conflicting earlier accesses to its memory."""
        read = [BufferChunk(reads.buffer, reads.chunk + i) for i in range(count)] if reads else []
        written = (
            [BufferChunk(writes.buffer, writes.chunk + i) for i in range(count)] if writes else []
        )
        needs = [self.writer[p] for p in (*read, *written) if p in self.writer]
        for place in written:
            needs += self.readers.get(place, ())
        step = block.add(kind, src, dst, count, needs)
        for place in read:
            self.readers.setdefault(place, []).append(step)
        for place in written:
            self.writer[place] = step
            self.readers[place] = []


class _ChunkRun(NamedTuple):
    """Run of adjacent chunks in one message. `stream` distinguishes the messages of one round."""

    src: int
    dst: int
    reduce: bool
    stream: tuple[int, int]
    src_place: BufferChunk
    dst_place: BufferChunk
    chunks: int


class _ProgramWriter:
    def __init__(self, schedule: Schedule) -> None:
        collective = schedule.collective
        self.places = BufferChunks(collective, schedule.scratch)
        self.gpus = [
            _GpuProgram(sizes={b: self.places.size(rank, b) for b in Buffer})
            for rank in range(collective.ranks)
        ]
        rounds = [
            self._runs(list(moves))
            for _, moves in groupby(sorted(moves_of(schedule)), key=itemgetter(0))
        ]
        streams = sorted({run.stream for runs in rounds for run in runs if run.src != run.dst})
        self.channels = {stream: channel for channel, stream in enumerate(streams)}
        self.pairs = {
            (run.src, run.dst, run.stream) for runs in rounds for run in runs if run.src != run.dst
        }
        if collective.op is Op.ALL_TO_ALL:
            self._keep_own(collective)
        for runs in rounds:
            self._emit(runs)

    def _keep_own(self, collective: Collective) -> None:
        """Adds a first step to each GPU, which copies the rank's own piece from its input to its
        output.
        """
        parts = collective.parts
        for rank, gpu in enumerate(self.gpus):
            src = BufferChunk(Buffer.INPUT, rank * parts)
            dst = BufferChunk(Buffer.OUTPUT, rank * parts)
            gpu.sizes[Buffer.INPUT] = gpu.sizes[Buffer.OUTPUT] = collective.ranks * parts
            gpu.add(gpu.block(-1, -1, 0), "cpy", src, dst, parts, reads=src, writes=dst)

    def _runs(self, moves: Sequence[Move]) -> list[_ChunkRun]:
        runs: list[_ChunkRun] = []
        messages: dict[tuple[int, int, int], int] = {}
        for m in moves:
            src, dst = self.places.of(m.src, m.src_chunk), self.places.of(m.dst, m.dst_chunk)
            last = runs[-1] if runs else None
            if last is not None and _follows(last, m, src, dst):
                runs[-1] = last._replace(chunks=last.chunks + 1)
                continue
            route = (m.src, m.dst, m.channel)
            number = messages[route] = messages.get(route, -1) + 1
            runs.append(_ChunkRun(m.src, m.dst, m.reduce, (m.channel, number), src, dst, 1))
        return runs

    def _emit(self, runs: Sequence[_ChunkRun]) -> None:
        for run in runs:
            if run.src != run.dst:
                block = self._block(run.src, run.dst, run, sends=True)
                self.gpus[run.src].add(
                    block, "s", run.src_place, run.dst_place, run.chunks, reads=run.src_place
                )
        for run in runs:  # the operands are reduced in rank order
            gpu = self.gpus[run.dst]
            kind, src, reads = "r", run.src_place, None
            block = gpu.block(-1, -1, 0)
            if run.src == run.dst:
                kind, reads = ("re" if run.reduce else "cpy"), run.src_place
            else:
                block = self._block(run.dst, run.src, run, sends=False)
                if run.reduce:
                    kind, src = "rrc", run.dst_place
            gpu.add(block, kind, src, run.dst_place, run.chunks, reads=reads, writes=run.dst_place)

    def _block(self, rank: int, peer: int, run: _ChunkRun, *, sends: bool) -> _Threadblock:
        """Returns the threadblock for a message. If two GPUs send messages in both directions, both
        directions share a threadblock.
        """
        there, back = (run.src, run.dst, run.stream), (run.dst, run.src, run.stream)
        both = there in self.pairs and back in self.pairs
        send = peer if sends or both else -1
        receive = peer if both or not sends else -1
        return self.gpus[rank].block(send, receive, self.channels[run.stream])


def _follows(last: _ChunkRun, m: Move, src: BufferChunk, dst: BufferChunk) -> bool:
    return (
        (last.src, last.dst, last.reduce, last.stream[0]) == (m.src, m.dst, m.reduce, m.channel)
        and src == (last.src_place.buffer, last.src_place.chunk + last.chunks)
        and dst == (last.dst_place.buffer, last.dst_place.chunk + last.chunks)
    )


def _xml(schedule: Schedule, name: str, gpus: Sequence[_GpuProgram]) -> str:
    collective = schedule.collective
    in_place = int(collective.op is not Op.ALL_TO_ALL)
    chunks = pieces(collective.op, collective.ranks) * collective.parts
    channels = max((b.channel + 1 for gpu in gpus for b in gpu.blocks.values()), default=0)
    root = "" if collective.root is None else f' root="{collective.root}"'
    lines = [
        f'<algo name="{escape(schedule.algorithm)}" proto="Simple" nchannels="{channels}" '
        f'nchunksperloop="{chunks}" ngpus="{collective.ranks}" coll="{name}" '
        f'inplace="{in_place}" outofplace="{1 - in_place}" minBytes="0" maxBytes="0"{root}>'
    ]
    for rank, gpu in enumerate(gpus):
        sizes = " ".join(f'{b}_chunks="{gpu.sizes[b]}"' for b in Buffer)
        lines.append(f'  <gpu id="{rank}" {sizes}>')
        numbers = {id(block): number for number, block in enumerate(gpu.blocks.values())}
        for number, block in enumerate(gpu.blocks.values()):
            lines.append(
                f'    <tb id="{number}" send="{block.send}" recv="{block.receive}" '
                f'chan="{block.channel}">'
            )
            lines += [_step_xml(step, numbers) for step in block.steps]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>", ""])


def _step_xml(step: _Step, numbers: dict[int, int]) -> str:
    need = step.waits_for
    depends = (-1, -1) if need is None else (numbers[id(need.block)], need.number)
    return (
        f'      <step s="{step.number}" type="{step.type}" '
        f'srcbuf="{step.src.buffer}" srcoff="{step.src.chunk}" '
        f'dstbuf="{step.dst.buffer}" dstoff="{step.dst.chunk}" cnt="{step.chunks}" '
        f'depid="{depends[0]}" deps="{depends[1]}" hasdep="{int(step.has_dependents)}"/>'
    )
