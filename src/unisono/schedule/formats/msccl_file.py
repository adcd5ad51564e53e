"""Parser of MSCCL XML. Its errors name the line in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.parsers import expat

from unisono.errors import ScheduleError
from unisono.schedule.formats.buffers import Buffer

MOST_CHARACTERS = 1 << 26
"""Largest accepted file, in characters."""

_MOST_NUMBER = (1 << 31) - 1
_SENDS = frozenset(("s", "rcs", "rrs", "rrcs"))
_RECEIVES = frozenset(("r", "rcs", "rrc", "rrs", "rrcs"))
_READS = frozenset(("s", "rrc", "rrs", "rrcs", "cpy", "re"))
_WRITES = frozenset(("r", "rcs", "rrc", "rrcs", "cpy", "re"))
_TYPES = _SENDS | _RECEIVES | _READS | {"nop"}


class MscclStep(NamedTuple):
    """One instruction of a threadblock."""

    where: str
    type: str
    src_buffer: Buffer
    src: int
    dst_buffer: Buffer
    dst: int
    chunks: int
    depends: tuple[int, int] | None
    has_dependents: bool

    @property
    def sends(self) -> bool:
        """True if the step sends chunks to the threadblock's send peer."""
        return self.type in _SENDS

    @property
    def receives(self) -> bool:
        """True if the step receives chunks from the threadblock's receive peer."""
        return self.type in _RECEIVES

    @property
    def reads(self) -> bool:
        """True if the step reads its source in local memory."""
        return self.type in _READS

    @property
    def writes(self) -> bool:
        """True if the step writes its destination."""
        return self.type in _WRITES


@dataclass(slots=True, kw_only=True)
class MscclBlock:
    """A threadblock with one send peer and one receive peer, on one channel."""

    where: str
    number: int
    send: int | None
    receive: int | None
    channel: int
    steps: list[MscclStep] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Gpu:
    """One GPU: the sizes of its buffers in chunks, and its threadblocks in the order of their
    numbers.
    """

    where: str
    number: int
    chunks: Mapping[Buffer, int]
    blocks: list[MscclBlock] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Program:
    """A whole MSCCL file. `chunks` is the number of chunks per loop of a GPU's input or output,
    whichever is larger.
    """

    name: str
    collective: str
    chunks: int
    in_place: bool
    out_of_place: bool
    root: int
    gpus: list[Gpu] = field(default_factory=list)


def parse(text: str) -> Program:
    """Parses a file. Raises `ScheduleError` with the line for an invalid file.

    The parser rejects a document type, so that no XML entity is ever expanded.
    """
    if len(text) > MOST_CHARACTERS:
        raise ScheduleError(f"expected at most {MOST_CHARACTERS} characters, got {len(text)}")
    reader = _Reader()
    try:
        reader.parser.Parse(text, True)
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise ScheduleError(f"line {error.lineno}: not XML: {what}") from error
    return reader.finish()


class _Reader:
    """Reader of XML elements, which records the line of each element."""

    def __init__(self) -> None:
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.open: list[str] = []
        self.program: Program | None = None

    def finish(self) -> Program:
        program = self.program
        if program is None:
            raise ScheduleError("expected an <algo> element, got none")
        for number, gpu in enumerate(program.gpus):
            if gpu.number != number:
                raise ScheduleError(f"expected gpu {number}, got {gpu.where}")
            _check_blocks(gpu, len(program.gpus))
        return program

    def _doctype(self, *_: object) -> None:
        raise ScheduleError(f"{self._line()}: a document type is not allowed; remove it")

    def _line(self) -> str:
        return f"line {self.parser.CurrentLineNumber}"

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        path = (*self.open, name)
        self.open.append(name)
        fields = _Fields(f"{self._line()}: <{name}>", attributes)
        if path == ("algo",):
            self._algo(fields)
            return
        program = self.program
        if program is not None and path == ("algo", "gpu"):
            self._gpu(fields, program)
        elif program is not None and path == ("algo", "gpu", "tb"):
            self._block(fields, program.gpus[-1])
        elif program is not None and path == ("algo", "gpu", "tb", "step"):
            self._step(fields, program.gpus[-1])
        else:
            above = f"<{path[-2]}>" if len(path) > 1 else "the top"
            raise ScheduleError(f"{fields.where} is not allowed inside {above}")

    def _end(self, _: str) -> None:
        self.open.pop()

    def _algo(self, fields: _Fields) -> None:
        in_place = fields.flag("inplace", False)
        self.program = Program(
            name=fields.text("name"),
            collective=fields.text("coll"),
            chunks=fields.number("nchunksperloop", least=1),
            in_place=in_place,
            out_of_place=fields.flag("outofplace", not in_place),
            root=fields.number("root", 0),
        )
        self.ranks = fields.number("ngpus", least=1)

    def _gpu(self, fields: _Fields, program: Program) -> None:
        number = fields.number("id")
        program.gpus.append(
            Gpu(
                where=f"gpu {number} ({self._line()})",
                number=number,
                chunks={b: fields.number(f"{b}_chunks") for b in Buffer},
            )
        )

    def _block(self, fields: _Fields, gpu: Gpu) -> None:
        number = fields.number("id")
        gpu.blocks.append(
            MscclBlock(
                where=f"gpu {gpu.number}, threadblock {number}",
                number=number,
                send=fields.peer("send"),
                receive=fields.peer("recv"),
                channel=fields.number("chan"),
            )
        )

    def _step(self, fields: _Fields, gpu: Gpu) -> None:
        block = gpu.blocks[-1]
        number = fields.number("s")
        where = f"{block.where}, step {number} ({self._line()})"
        if number != len(block.steps):
            raise ScheduleError(f"expected step {len(block.steps)}, got {where}")
        kind = fields.text("type")
        if kind not in _TYPES:
            raise ScheduleError(
                f"{where}: expected a type in {', '.join(sorted(_TYPES))}, got {kind!r}"
            )
        other = fields.number("depid", least=-1)
        after = fields.number("deps", least=-1)
        step = MscclStep(
            where=where,
            type=kind,
            src_buffer=fields.buffer("srcbuf"),
            src=fields.number("srcoff", least=-1),
            dst_buffer=fields.buffer("dstbuf"),
            dst=fields.number("dstoff", least=-1),
            chunks=fields.number("cnt", least=0 if kind == "nop" else 1),
            depends=(other, after) if other >= 0 else None,
            has_dependents=fields.flag("hasdep", False) and kind != "nop",
        )
        _check_step(step, block, gpu)
        block.steps.append(step)


class _Fields:
    """Attributes of one XML element. Like MSCCL, the parser ignores unknown attributes."""

    def __init__(self, where: str, attributes: Mapping[str, str]) -> None:
        self.where = where
        self._attributes = attributes

    def text(self, name: str) -> str:
        try:
            return self._attributes[name]
        except KeyError:
            raise ScheduleError(f"{self.where}: missing attribute {name}") from None

    def number(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        if default is not None and name not in self._attributes:
            return default
        text = self.text(name)
        if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()):
            raise ScheduleError(f"{self.where}: expected a number, got {name}={text!r:.40}")
        if len(text) > 11 or not least <= int(text) <= _MOST_NUMBER:
            raise ScheduleError(
                f"{self.where}: expected {name} in {least}..{_MOST_NUMBER}, got {text:.40}"
            )
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        value = self.number(name, int(default))
        if value > 1:
            raise ScheduleError(f"{self.where}: expected {name} to be 0 or 1, got {value}")
        return value == 1

    def peer(self, name: str) -> int | None:
        number = self.number(name, least=-1)
        return number if number >= 0 else None

    def buffer(self, name: str) -> Buffer:
        text = self.text(name)
        if text not in list(Buffer):
            raise ScheduleError(f"{self.where}: expected {name} to be i, o or s, got {text!r:.40}")
        return Buffer(text)


def _check_step(step: MscclStep, block: MscclBlock, gpu: Gpu) -> None:
    if step.sends and block.send is None:
        raise ScheduleError(f"{step.where} sends, but its threadblock has no send peer")
    if step.receives and block.receive is None:
        raise ScheduleError(f"{step.where} receives, but its threadblock has no receive peer")
    for used, buffer, start in (
        (step.reads, step.src_buffer, step.src),
        (step.writes, step.dst_buffer, step.dst),
    ):
        if used and not 0 <= start <= start + step.chunks <= gpu.chunks[buffer]:
            raise ScheduleError(
                f"{step.where} needs {buffer}[{start}:{start + step.chunks}], but the buffer "
                f"has {gpu.chunks[buffer]} chunks"
            )


def _check_blocks(gpu: Gpu, ranks: int) -> None:
    connections: dict[tuple[str, int, int], str] = {}
    for number, block in enumerate(gpu.blocks):
        if block.number != number:
            raise ScheduleError(f"expected threadblock {number}, got {block.where}")
        for action, peer in (("send to", block.send), ("receive from", block.receive)):
            if peer is None:
                continue
            if peer >= ranks or peer == gpu.number:
                raise ScheduleError(f"{block.where} cannot {action} gpu {peer} of {ranks}")
            other = connections.setdefault((action, peer, block.channel), block.where)
            if other != block.where:
                raise ScheduleError(
                    f"{block.where} and {other} both {action} gpu {peer} on channel {block.channel}"
                )
        for step in block.steps:
            _check_dependence(step, gpu)


def _check_dependence(step: MscclStep, gpu: Gpu) -> None:
    if step.depends is None:
        return
    other, after = step.depends
    if other >= len(gpu.blocks):
        raise ScheduleError(f"{step.where} waits for threadblock {other}, which does not exist")
    if not any(s.has_dependents for s in gpu.blocks[other].steps[max(after, 0) :]):
        raise ScheduleError(
            f"{step.where} waits for step {after} of threadblock {other}, but neither that step "
            "nor a later one is marked hasdep"
        )
