"""Parser of MSCCL++ execution plans. Its errors name the invalid field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple, TypeAlias

from unisono.errors import ScheduleError, UnsupportedError
from unisono.schedule.formats.buffers import Buffer, Cell

Json: TypeAlias = Any
"""Any value that a JSON reader returns."""

MOST_CHARACTERS = 1 << 26
"""Largest accepted file, in characters."""

_MOST_NUMBER = (1 << 31) - 1

DATA = frozenset(
    ("copy", "put", "pws", "pwsf", "get", "re", "res", "rre", "rres", "glres", "gstore")
)
PACKETS = frozenset(("ppkt", "rppkt", "upkt", "cpkt", "repkt", "respkt", "recpkt", "recspkt"))
SYNCHRONISING = frozenset(
    ("nop", "barrier", "signal", "wait", "rlxsignal", "rlxwait", "flush", "sem_acquire")
) | {"sem_release"}


class Range(NamedTuple):
    """Chunks `start .. start + length` of one buffer, on one or several GPUs."""

    gpus: tuple[int, ...]
    buffer: Buffer
    start: int
    length: int

    def cells(self, at: int) -> list[Cell]:
        """Returns the cell at index `at` of the range, once for each GPU of the range."""
        return [Cell(gpu, self.buffer, self.start + at) for gpu in self.gpus]


class MscclppChannel(NamedTuple):
    """One end of a channel. `number` is the index of the channel among all channels of the same
    kind from `gpu` to `peer`.
    """

    kind: str
    gpu: int
    peer: int
    number: int

    @property
    def other_end(self) -> MscclppChannel:
        """The other end of the channel."""
        return MscclppChannel(self.kind, self.peer, self.gpu, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class MscclppStep:
    """One operation of a threadblock."""

    where: str
    name: str
    sources: tuple[Range, ...]
    targets: tuple[Range, ...]
    channels: tuple[MscclppChannel, ...]
    kind: str
    semaphores: tuple[int, ...]
    barrier: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MscclppPlan:
    """A whole MSCCL++ plan. `chunks` is the largest number of chunks in the input or output of any
    GPU.
    """

    name: str
    collective: str
    in_place: bool
    chunks: int
    sizes: tuple[Mapping[Buffer, int], ...]
    blocks: tuple[tuple[int, str, tuple[MscclppStep, ...]], ...]
    """Threadblocks, each as (gpu, name for errors, steps)."""
    semaphores: tuple[tuple[int, ...], ...]
    """Initial values of the semaphores of each GPU."""


def parse(text: str) -> MscclppPlan:
    """Parses a plan. Raises `ScheduleError` with the invalid field for an invalid plan."""
    if len(text) > MOST_CHARACTERS:
        raise ScheduleError(f"expected at most {MOST_CHARACTERS} characters, got {len(text)}")
    try:
        top = Fields(json.loads(text), "plan")
    except (json.JSONDecodeError, RecursionError) as error:
        raise ScheduleError(f"not JSON: {error}") from error
    gpus = top.objects("gpus")
    if not gpus:
        raise ScheduleError("plan.gpus: expected at least one gpu, got none")
    if "inputChunks" in gpus[0].data or "i_chunks" in gpus[0].data:
        raise UnsupportedError(
            "unsupported older plan format; write the plan with the current MSCCL++ DSL"
        )
    factor = lcm(1, *_slices(gpus))
    readers = [_GpuSection(gpu, rank, len(gpus), factor) for rank, gpu in enumerate(gpus)]
    return MscclppPlan(
        name=top.text("name"),
        collective=top.text("collective"),
        in_place=top.flag("inplace"),
        chunks=max(max(r.sizes[Buffer.INPUT], r.sizes[Buffer.OUTPUT]) for r in readers),
        sizes=tuple(r.sizes for r in readers),
        blocks=tuple(block for r in readers for block in r.blocks()),
        semaphores=tuple(r.semaphores for r in readers),
    )


class Fields:
    """One JSON object and its path in the file."""

    def __init__(self, data: Json, where: str) -> None:
        if not isinstance(data, dict):
            raise ScheduleError(f"{where}: expected an object, got {type(data).__name__}")
        self.data: dict[str, Json] = data
        self.where = where

    def _get(self, name: str, default: Json) -> Json:
        if name in self.data:
            return self.data[name]
        if default is None:
            raise ScheduleError(f"{self.where}: missing {name}")
        return default

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise ScheduleError(f"{self.where}.{name}: expected text, got {value!r:.40}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        return self._number(self._get(name, default), name)

    def numbers(self, name: str) -> list[int]:
        return [self._number(value, name) for value in self._list(name)]

    def flag(self, name: str) -> bool:
        value = self._get(name, None)
        if not isinstance(value, bool):
            raise ScheduleError(f"{self.where}.{name}: expected true or false, got {value!r:.40}")
        return value

    def objects(self, name: str) -> list[Fields]:
        """Returns the objects in a list field. The result is empty if the field is absent."""
        return [
            Fields(value, f"{self.where}.{name}[{i}]") for i, value in enumerate(self._list(name))
        ]

    def _list(self, name: str) -> list[Json]:
        value = self._get(name, [])
        if not isinstance(value, list):
            raise ScheduleError(f"{self.where}.{name}: expected a list, got {value!r:.40}")
        return value

    def _number(self, value: Json, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_NUMBER:
            raise ScheduleError(
                f"{self.where}.{name}: expected a number in 0..{_MOST_NUMBER}, got {value!r:.40}"
            )
        return value


def _flat(block: Fields) -> Iterator[Fields]:
    """Yields the operations of a threadblock. The operations of a pipeline are yielded once, not
    once per iteration of the pipeline.
    """
    for op in block.objects("ops"):
        if op.text("name") == "pipeline":
            yield from op.objects("ops")
        else:
            yield op


def _slices(gpus: list[Fields]) -> Iterator[int]:
    for gpu in gpus:
        for block in gpu.objects("threadblocks"):
            for op in _flat(block):
                if "tbg_info" in op.data:
                    size = Fields(op.data["tbg_info"], f"{op.where}.tbg_info").number("tbg_size")
                    if not 1 <= size <= 1024:
                        raise ScheduleError(
                            f"{op.where}.tbg_info: expected a tbg_size in 1..1024, got {size}"
                        )
                    yield size


class _GpuSection:
    """Reader of the section of one GPU. Each chunk is cut into `factor` parts, so that the
    threadblocks of a group can share operations.
    """

    def __init__(self, fields: Fields, rank: int, ranks: int, factor: int) -> None:
        if fields.number("id") != rank:
            raise ScheduleError(f"{fields.where}: expected id {rank}, got {fields.number('id')}")
        self.fields, self.rank, self.ranks, self.factor = fields, rank, ranks, factor
        names = {Buffer.INPUT: "input", Buffer.OUTPUT: "output", Buffer.SCRATCH: "scratch"}
        self.sizes = {b: fields.number(f"{name}_chunks") * factor for b, name in names.items()}
        self.semaphores = tuple(s.number("init_value") for s in fields.objects("semaphores"))
        self.channels: dict[str, list[MscclppChannel]] = {"memory": [], "port": []}
        self.switches: list[tuple[Buffer, tuple[int, ...]]] = []
        for channel in fields.objects("channels"):
            self._channel(channel)
        self.remote = [
            (self._peer(r, r.number("rank")), _buffer(r, "type"))
            for r in fields.objects("remote_buffers")
        ]

    def blocks(self) -> Iterator[tuple[int, str, tuple[MscclppStep, ...]]]:
        for block in self.fields.objects("threadblocks"):
            where = f"gpu {self.rank}, threadblock {block.number('id')}"
            steps = tuple(
                self._step(op, block, f"{where}, op {i} ({op.text('name')})")
                for i, op in enumerate(_flat(block))
            )
            yield self.rank, where, steps

    def _channel(self, channel: Fields) -> None:
        kind = channel.text("channel_type")
        if kind == "switch":
            for group in channel.objects("rank_groups"):
                ranks = tuple(self._peer(group, r) for r in group.numbers("ranks"))
                self.switches.append((_buffer(channel, "buffer_type", "buff"), ranks))
            return
        if kind not in self.channels:
            raise ScheduleError(
                f"{channel.where}: expected channel type memory, port or switch, got {kind!r}"
            )
        for peer in channel.numbers("connected_to"):
            self._peer(channel, peer)
            number = sum(channel.peer == peer for channel in self.channels[kind])
            self.channels[kind].append(MscclppChannel(kind, self.rank, peer, number))

    def _peer(self, fields: Fields, rank: int) -> int:
        if rank >= self.ranks:
            raise ScheduleError(
                f"{fields.where}: expected a gpu in 0..{self.ranks - 1}, got {rank}"
            )
        return rank

    def _step(self, op: Fields, block: Fields, where: str) -> MscclppStep:
        name = op.text("name")
        if name not in DATA | PACKETS | SYNCHRONISING:
            known = ", ".join(sorted(DATA | PACKETS | SYNCHRONISING))
            raise UnsupportedError(f"{where}: unsupported operation; expected one of {known}")
        kind = op.text("channel_type", "none")
        own = [
            id for c in block.objects("channels") if c.text("channel_type") == kind
            for id in c.numbers("channel_ids")
        ]  # fmt: skip
        channels = self.channels.get(kind, [])
        return MscclppStep(
            where=where,
            name=name,
            sources=tuple(self._range(b, op, block, kind) for b in op.objects("src_buff")),
            targets=tuple(self._range(b, op, block, kind) for b in op.objects("dst_buff")),
            channels=tuple(
                _at(channels, _at(own, i, where, "channel"), where, "channel")
                for i in (op.numbers("channel_ids") if kind in self.channels else ())
            ),
            kind=kind,
            semaphores=tuple(op.numbers("semaphore_ids")),
            barrier=(op.number("barrier_id", 0), op.number("num_threadblocks", 1)),
        )

    def _range(self, part: Fields, op: Fields, block: Fields, kind: str) -> Range:
        gpus: tuple[int, ...] = (self.rank,)
        if "buffer_id" in part.data:
            ids = [
                id for r in block.objects("remote_buffer_refs")
                if r.text("access_channel_type") == kind for id in r.numbers("remote_buffer_ids")
            ]  # fmt: skip
            number = _at(ids, part.number("buffer_id"), part.where, "remote buffer")
            gpu, buffer = _at(self.remote, number, part.where, "remote buffer")
            gpus = (gpu,)
        elif "switch_channel_id" in part.data:
            ids = [
                id for c in block.objects("channels") if c.text("channel_type") == "switch"
                for id in c.numbers("channel_ids")
            ]  # fmt: skip
            number = _at(ids, part.number("switch_channel_id"), part.where, "switch channel")
            buffer, gpus = _at(self.switches, number, part.where, "switch channel")
        else:
            buffer = _buffer(part, "type")
        start, length = part.number("index") * self.factor, part.number("size") * self.factor
        if "tbg_info" in op.data:
            group = Fields(op.data["tbg_info"], f"{op.where}.tbg_info")
            share = length // group.number("tbg_size")
            if group.number("tb_id") >= group.number("tbg_size"):
                raise ScheduleError(f"{group.where}: expected a tb_id below tbg_size")
            start, length = start + group.number("tb_id") * share, share
        return Range(gpus, buffer, start, length)


def _at(items: list[Any], number: int, where: str, what: str) -> Any:
    if number >= len(items):
        raise ScheduleError(f"{where}: expected a {what} below {len(items)}, got {number}")
    return items[number]


def _buffer(fields: Fields, *names: str) -> Buffer:
    name = next((n for n in names if n in fields.data), names[0])
    text = fields.text(name)
    if text not in list(Buffer):
        raise ScheduleError(f"{fields.where}.{name}: expected i, o or s, got {text!r:.40}")
    return Buffer(text)
