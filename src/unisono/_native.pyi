from collections.abc import Callable, Sequence
from typing import Any

Memory = Sequence[tuple[int, int]]

class Plan:
    def __init__(
        self,
        packed: bytes,
        rank: int,
        ranks: int,
        pieces_in: int,
        pieces_out: int,
        parts: int,
        stages: int,
        slots: Sequence[int],
        scratch: int,
    ) -> None: ...

class Prepared:
    def __init__(
        self,
        plan: Plan,
        op: int,
        dtype: int,
        reduction: int,
        root: int,
        count: int,
        extra: int,
        block_bytes: int,
        piece_bytes: int,
        longest_bytes: int,
        policy: int,
        caller_dtype: int | None = None,
    ) -> None: ...

class Job:
    def done(self) -> bool: ...
    def error(self) -> tuple[int, str] | None: ...

class Parcel:
    def done(self) -> bool: ...
    def error(self) -> tuple[int, str] | None: ...
    def source(self) -> int: ...

class Group:
    def __init__(self, fd: int, rank: int, nonce: bytes, cores: int) -> None: ...
    @property
    def ranks(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def area_bytes(self) -> int: ...
    @property
    def calls(self) -> int: ...
    def require_healthy(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def fail_mismatch(self, text: str) -> None: ...
    def close(self) -> None: ...
    def run_pieces(
        self,
        call: Prepared,
        in_: Memory,
        out: Memory,
        timeout_s: float,
        then: Callable[[], tuple[Prepared, Memory, Memory]] | None = None,
    ) -> None: ...
    def submit_pieces(
        self,
        call: Prepared,
        in_: Memory,
        out: Memory,
        timeout_s: float,
        inline_s: float,
        then: Callable[[], tuple[Prepared, Memory, Memory]] | None = None,
    ) -> Job: ...
    def wait(self, job: Job, timeout_s: float) -> bool: ...
    def send(self, data: int, bytes: int, dtype: int, peer: int, tag: int) -> Parcel: ...
    def receive(self, data: int, bytes: int, dtype: int, peer: int, tag: int) -> Parcel: ...
    def carry_on(self) -> None: ...
    def wait_parcel(self, parcel: Parcel, timeout_s: float, limit_s: float) -> bool: ...

class QuickCalls:
    timeout_s: float
    def __init__(
        self, group: Group, make_work: Callable[[Job, object, Any], Any], inline_s: float
    ) -> None: ...
    def learn(
        self,
        op: int,
        in_: tuple[int, int, int],
        out: tuple[int, int, int],
        reduction: object,
        root: int,
        algorithm: object,
        call: Prepared,
        like: object,
    ) -> None: ...
    def run(
        self,
        op: int,
        in_: object,
        out: object,
        reduction: object,
        root: int,
        algorithm: object,
        async_op: bool,
    ) -> Any: ...

def create_segment(ranks: int, cores: int, staging_bytes: int, nonce: bytes) -> int: ...
def isa() -> str: ...
def last_level_cache_bytes() -> int: ...
def locate(array: object, writable: bool) -> tuple[int, int, int] | None: ...
def pack(pieces: Memory, to: int) -> None: ...
def unpack(from_: int, pieces: Memory) -> None: ...
def settle_on_core(index: int) -> None: ...
def probe_core_latency(samples: int) -> float: ...
def usable_cores() -> int: ...
