"""Symbolic replay of execution plans over several blocks, with a limited number of slots. The
replay proves the result of `lower`.

Ranks wait for numbers that only grow. So the outcome does not depend on the order in which the
ranks run. One order therefore suffices to find deadlocks. The order must also not decide whether a
read is allowed. So each rank carries a vector clock, which only POST and WAIT pass on. A rank may
read a slot only if the slot's write is in the reader's clock. A rank may overwrite a slot only if
all reads of the slot are in the writer's clock. The same rules hold for memory that other ranks
read in place. Only the output of an in-place call may overwrite such memory. References keep their
encoding as numbers (`record.words`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from unisono.errors import ScheduleError
from unisono.schedule.collective import Collective
from unisono.schedule.execution_plan import ExecutionPlan
from unisono.schedule.record import Code, Flag, Ref, Space, words
from unisono.schedule.replayed_rank import Content, ReplayedRank, Row, Slot

# Plain integers compare faster than enumeration members.
_COPY, _ARG, _WAIT, _POST = (int(c) for c in (Code.COPY, Code.ARG, Code.WAIT, Code.POST))
_SHARE = int(Code.SHARE)
_IN, _OUT, _SLOT, _SHARED = (int(s) for s in (Space.IN, Space.OUT, Space.SLOT, Space.SHARED))
_HAS_DST2, _FINAL, _SHARES, _WRITES_BACK = (
    int(f) for f in (Flag.HAS_DST2, Flag.FINAL, Flag.SHARES, Flag.WRITES_BACK)
)
_SPACE = 0xFF


def check_plans(
    collective: Collective,
    plans: Sequence[ExecutionPlan],
    *,
    depth: int = 1,
    blocks: int = 3,
    lead: int = 0,
    in_place: bool = False,
) -> None:
    """Proves that the plans never deadlock, never race, and perform the collective.

    Each rank owns slots for `depth` blocks. The first round of the schedule runs `lead` blocks
    ahead of the last round, as in the native executor. In step s, a record of round r processes
    block s - lead + `lead_of(r, ...)`. With `in_place`, inputs that other ranks read in place are
    in the memory of the output. Raises `ScheduleError` with the rank, the record and the block.

    >>> from unisono.schedule import Builder, lower
    >>> from unisono.types import Op
    >>> b = Builder(Collective(op=Op.BROADCAST, ranks=2, root=0), "direct")
    >>> b.copy(0, 0, 1)
    >>> writes, reads = lower(b.build())
    >>> check_plans(b.build().collective, [writes, reads], depth=2)
    """
    _Replay(collective, plans, depth, blocks, lead, in_place).run()


def lead_of(round_: int, rounds: int, lead: int) -> int:
    """Returns the lead of a round: the number of blocks by which the executor runs this round ahead
    of the schedule's last round.

    >>> [lead_of(r, 6, 2) for r in range(6)]
    [2, 2, 1, 1, 0, 0]
    """
    return lead - round_ * (lead + 1) // rounds


class _Replay:
    def __init__(
        self,
        collective: Collective,
        plans: Sequence[ExecutionPlan],
        depth: int,
        blocks: int,
        lead: int,
        in_place: bool,
    ) -> None:
        self.collective = collective
        self.depth = depth
        self.blocks = blocks
        self.ranks = [
            ReplayedRank(plan=plan, rows=plan.table.tolist(), clock=[0] * collective.ranks)
            for plan in plans
        ]
        self.slots: dict[tuple[int, int], Slot] = {}
        stages = {(plan.stages, plan.rounds) for plan in plans}
        if len(stages) != 1:
            raise ScheduleError(
                f"plans have different numbers of stages or rounds: {sorted(stages)}"
            )
        self.stages, rounds = stages.pop()
        self.lead = min(lead, depth - 1, blocks - 1, rounds - 1)
        self.leads = [lead_of(round_, rounds, self.lead) for round_ in range(rounds)]
        self.steps = blocks + self.lead
        for rank in self.ranks:
            self._check_last(rank.plan)
            rank.inputs = self._inputs(rank.plan.rank)
            rank.results = self._results(rank.plan.rank)
            rank.aliased_inputs = self._aliased_inputs(rank.plan.rank) if in_place else {}

    def run(self) -> None:
        """Runs every rank as far as possible, until all ranks finish or none can continue."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.step < self.steps and self._advance(rank):
                    moved = True
        stuck = [rank for rank in self.ranks if rank.step < self.steps]
        if stuck:
            raise ScheduleError("deadlock: " + "; ".join(self._where(rank) for rank in stuck))

    def _advance(self, rank: ReplayedRank) -> bool:
        if not rank.entered:
            rank.block = rank.step
            if rank.step < self.blocks and not self._enter(rank):
                return False
            rank.memory[rank.block] = dict(rank.inputs)
            rank.shared_slots[rank.block] = {}
            rank.local_reads[rank.block], rank.foreign_writes[rank.block] = {}, {}
            rank.entered = True
        row = rank.rows[rank.pc]
        rank.block = rank.step - self.lead + self.leads[row[5]]
        if 0 <= rank.block < self.blocks and not self._run(rank, row):
            return False
        rank.pc += 1
        if rank.pc == len(rank.rows):
            self._end_step(rank)
        return True

    def _run(self, rank: ReplayedRank, row: Row) -> bool:
        code, value = row[0], rank.step * self.stages + row[4]
        rank.clock[rank.plan.rank] += 1
        if code == _WAIT:  # the peer runs this post `earlier` steps before the wait
            earlier = self.leads[row[6]] - self.leads[row[5]]
            return self._join(rank, row[2], value - earlier * self.stages)
        if code == _POST:
            self._post(rank, value)
        elif code != _ARG:
            self._move(rank, row)
        return True

    def _enter(self, rank: ReplayedRank) -> bool:
        """Enters a block, which reuses the slots of the block `depth` blocks earlier. All other
        ranks must have finished this earlier block. Returns false if the rank cannot enter.
        """
        if rank.plan.num_slots == 0 or rank.block < self.depth:
            return True
        need = (rank.block - self.depth + self.lead + 1) * self.stages
        others = [r.plan.rank for r in self.ranks if r is not rank]
        return all(self._join(rank, peer, need) for peer in others)

    def _join(self, rank: ReplayedRank, peer: int, need: int) -> bool:
        """Merges a clock into the rank's clock: the clock at the peer's first post with a number of
        at least `need`. Returns false if the peer has not made such a post.
        """
        other = self.ranks[peer]
        at = bisect_left(other.posted, need)
        if at == len(other.posted):
            return False
        theirs = other.post_clocks[at]
        if rank.clock[peer] < theirs[peer]:  # otherwise the clock already includes this post
            rank.clock = list(map(max, rank.clock, theirs))
        return True

    def _post(self, rank: ReplayedRank, value: int) -> None:
        if rank.posted and value <= rank.posted[-1]:
            raise ScheduleError(f"{self._where(rank)}: expected a value above the last post")
        rank.posted.append(value)
        rank.post_clocks.append(tuple(rank.clock))

    def _move(self, rank: ReplayedRank, row: Row) -> None:
        code, nsrc, _, flags, _, _, _, dst, dst2, src, _ = row
        if code == _SHARE:
            return self._share(rank, dst, src, writable=bool(flags & _WRITES_BACK))
        if code == _COPY:
            content = self._read(rank, src)
        else:
            args = rank.rows[rank.pc + 1 : rank.pc + 1 + nsrc]
            if len(args) < nsrc or any(arg[0] != _ARG for arg in args):
                raise ScheduleError(f"{self._where(rank)}: expected {nsrc} ARG records to follow")
            content = self._fold(rank, [self._read(rank, arg[9]) for arg in args])
            final = content[1] == (1 << self.collective.ranks) - 1
            if final != bool(flags & _FINAL):
                raise ScheduleError(f"{self._where(rank)}: FINAL does not match the contributions")
        self._store(rank, dst, content)
        if flags & _HAS_DST2:
            self._store(rank, dst2, content)
        if flags & _SHARES:
            self._share(rank, dst2, dst)
        if flags & _WRITES_BACK:
            for arg in args:
                if arg[9] & _SPACE == _SHARED:
                    self._write_back(rank, arg[9], content)

    def _write_back(self, rank: ReplayedRank, ref: int, content: Content) -> None:
        """Writes to another rank's input, which is also its output. No other rank may read it, and
        its owner must have finished its own reads.
        """
        owner = self.ranks[_owner(ref)]
        slot = self.slots[ref ^ _SHARED ^ _SLOT, rank.block % self.depth]
        shared = [what for what, s in owner.shared_slots.get(rank.block, {}).items() if s is slot]
        outputs = [out for out, given in owner.aliased_inputs.items() if [given] == shared]
        readers = {r.rank for r in owner.plan.readers if r.slot == slot.index}
        if len(outputs) != 1 or readers != {rank.plan.rank} or not slot.writable:
            raise ScheduleError(
                f"{self._where(rank)}: {_text(ref)} is not the output of an in-place call that "
                "only this rank reads and may write"
            )
        if owner.local_reads[rank.block].get(shared[0], 0) > rank.clock[owner.plan.rank]:
            raise ScheduleError(
                f"{self._where(rank)}: {_text(ref)} may be overwritten while its owner reads it"
            )
        owner.memory[rank.block][outputs[0]] = content
        owner.memory[rank.block].pop(shared[0])
        write = rank.plan.rank, rank.clock[rank.plan.rank]
        owner.foreign_writes[rank.block][outputs[0]] = write

    def _share(self, rank: ReplayedRank, slot: int, what: int, *, writable: bool = False) -> None:
        if slot & _SPACE != _SLOT or what & _SPACE not in (_IN, _OUT):
            raise ScheduleError(
                f"{self._where(rank)}: expected a slot and an input or output, got {_text(what)}"
            )
        self._store(rank, slot, self._read(rank, what), holds_address=True)
        made = rank.shared_slots[rank.block][what] = self.slots[slot, rank.block % self.depth]
        made.writable = writable

    def _fold(self, rank: ReplayedRank, contents: list[Content]) -> Content:
        chunk, mask = contents[0]
        for other, more in contents[1:]:
            if other != chunk or mask & more:
                raise ScheduleError(
                    f"{self._where(rank)}: operands of several chunks, or a contribution twice"
                )
            mask |= more
        return chunk, mask

    def _read(self, rank: ReplayedRank, ref: int) -> Content:
        space = ref & _SPACE
        if space not in (_SLOT, _SHARED):
            if ref not in rank.memory[rank.block]:
                raise ScheduleError(f"{self._where(rank)}: {_text(ref)} is empty")
            self._require_seen(rank, rank.block, ref)
            rank.local_reads[rank.block][ref] = rank.clock[rank.plan.rank]
            return rank.memory[rank.block][ref]
        slot = self.slots.get((ref ^ space ^ _SLOT, rank.block % self.depth))
        if slot is None or slot.block != rank.block or slot.written > rank.clock[_owner(ref)]:
            raise ScheduleError(
                f"{self._where(rank)}: {_text(ref)} may be read before it is written"
            )
        if slot.holds_address != (space == _SHARED):
            raise ScheduleError(
                f"{self._where(rank)}: {_text(ref)} and its slot disagree about single copy"
            )
        slot.reads[rank.plan.rank] = rank.clock[rank.plan.rank]
        return slot.content

    def _store(
        self, rank: ReplayedRank, ref: int, content: Content, *, holds_address: bool = False
    ) -> None:
        me = rank.plan.rank
        if _owner(ref) != me or ref & _SPACE in (_IN, _SHARED):
            raise ScheduleError(f"{self._where(rank)}: {_text(ref)} is not writable by this rank")
        if ref & _SPACE != _SLOT:
            self._require_unread(rank, ref, content)
            rank.memory[rank.block][ref] = content
            return
        if _index(ref) >= rank.plan.num_slots:
            raise ScheduleError(
                f"{self._where(rank)}: expected a slot below {rank.plan.num_slots}, "
                f"got {_index(ref)}"
            )
        key = ref, rank.block % self.depth
        old = self.slots.get(key)
        if old is not None:
            if old.block == rank.block:
                raise ScheduleError(f"{self._where(rank)}: {_text(ref)} is written twice")
            late = [r for r, read in old.reads.items() if read > rank.clock[r]]
            if late:
                raise ScheduleError(
                    f"{self._where(rank)}: {_text(ref)} may be overwritten while rank "
                    f"{late[0]} reads it"
                )
        self.slots[key] = Slot(
            content=content,
            block=rank.block,
            written=rank.clock[me],
            index=_index(ref),
            holds_address=holds_address,
        )

    def _require_seen(self, rank: ReplayedRank, block: int, ref: int) -> None:
        """Raises `ScheduleError` unless the rank has waited for another rank's write to `ref`."""
        writer, clock = rank.foreign_writes[block].get(ref, (rank.plan.rank, 0))
        if rank.clock[writer] < clock:
            raise ScheduleError(
                f"rank {rank.plan.rank}, block {block}: {_text(ref)} may be read before rank "
                f"{writer} writes it"
            )

    def _require_unread(self, rank: ReplayedRank, ref: int, content: Content) -> None:
        """Raises `ScheduleError` if another rank may still read the overwritten memory in place."""
        shared_slots = rank.shared_slots[rank.block]
        shared_slot = shared_slots.get(ref)
        if shared_slot is None and ref in rank.aliased_inputs:
            shared_slot = shared_slots.get(rank.aliased_inputs[ref])
            if shared_slot is None or shared_slot.content == content:  # equal content does no harm
                return
            readers = (r.rank for r in rank.plan.readers if r.slot == shared_slot.index)
            if all(shared_slot.reads.get(r, rank.clock[r] + 1) <= rank.clock[r] for r in readers):
                return
        if shared_slot is not None:
            raise ScheduleError(
                f"{self._where(rank)}: {_text(ref)} may be overwritten while others read it"
            )

    def _end_step(self, rank: ReplayedRank) -> None:
        ended = rank.step - self.lead
        memory = rank.memory.pop(ended, {})
        rank.shared_slots.pop(ended, None)
        for out, want in rank.results.items():
            if ended >= 0 and memory.get(out) != want:
                raise ScheduleError(
                    f"rank {rank.plan.rank}, chunk {want[0]}, block {ended}: the output is wrong"
                )
            if ended >= 0:
                self._require_seen(rank, ended, out)
        for noted in (rank.local_reads, rank.foreign_writes):
            noted.pop(ended, None)
        rank.step, rank.pc, rank.entered = rank.step + 1, 0, False

    def _inputs(self, rank: int) -> dict[int, Content]:
        inputs: dict[int, Content] = {}
        for chunk in self.collective.initial(rank):
            ref = self.collective.input_ref(rank, chunk)
            assert ref is not None
            inputs[words(Space.IN, rank, *ref)] = chunk, 1 << rank
        return inputs

    def _results(self, rank: int) -> dict[int, Content]:
        results: dict[int, Content] = {}
        for chunk, contributors in self.collective.expected(rank).items():
            ref = self.collective.output_ref(rank, chunk)
            assert ref is not None
            results[words(Space.OUT, rank, *ref)] = chunk, sum(1 << r for r in contributors)
        return results

    def _aliased_inputs(self, rank: int) -> dict[int, int]:
        aliased_inputs: dict[int, int] = {}
        for piece in range(self.collective.input_pieces(rank)):
            out = self.collective.in_place_output(rank, piece)
            for part in range(self.collective.parts if out is not None else 0):
                where = words(Space.OUT, rank, out, part)
                aliased_inputs[where] = words(Space.IN, rank, piece, part)
        return aliased_inputs

    def _check_last(self, plan: ExecutionPlan) -> None:
        last = plan.records[-1] if plan.records else None
        if last is None or last.code is not Code.POST or last.value != plan.stages:
            raise ScheduleError(f"rank {plan.rank}: expected POST {plan.stages} as the last record")

    def _where(self, rank: ReplayedRank) -> str:
        row = rank.rows[rank.pc]
        what = Code(row[0]).name
        if row[0] == _WAIT:
            what += f" {row[2]}:{row[4]}"
        elif row[0] == _POST:
            what += f" {row[4]}"
        return f"rank {rank.plan.rank}, record {rank.pc} ({what}), block {rank.block}"


def _owner(ref: int) -> int:
    return ref >> 16 & 0xFFFF


def _index(ref: int) -> int:
    return ref >> 32 & 0xFFFF


def _text(word: int) -> str:
    ref = Ref.of(word)
    return f"{ref.space.name} {ref.index}.{ref.part} of rank {ref.rank}"
