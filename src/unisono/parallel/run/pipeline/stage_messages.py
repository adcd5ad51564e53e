"""The messages between two pipeline stages of different ranks.

In each step, the first result of a stage follows a header, which states the form of all its results
in this step. So the next stage learns the form from a pass with real values, and needs no pass of
its own to find it. The form itself is sent only if the header's digest is new. A digest of 0 states
that the stage has failed and sends no results in this step. The header also has the number of
microbatches, because a stage with another number would wait for messages that nobody sends.

Each message has a tag of its own, so the order of sends and receives does not matter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from unisono.parallel.run.pipeline.stage_result import ResultForm, TensorForm
from unisono.torch_backend import storage_uses

_T = TypeVar("_T")

_HEADER, _FORM, _RESULT, _GRADIENT = range(4)
_HEADER_NUMBERS = 2
HEADER_BYTES = 8 * _HEADER_NUMBERS
"""Bytes of the header that each step sends from a stage to the next."""

_FORM_SIZES = 2**32
"""The second number of a header is the size of the form, plus this times the microbatches."""
_STAGES = 2**12
"""More stages than any pipeline has."""
_KEPT_FORMS = 256  # on both sides of a boundary the same
_KEPT_BUFFERS = 4  # batch shapes whose receive memory is kept
_ALONE = 2  # uses of memory that only its own tensor uses


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """The boundary between two stages of different ranks, as one of these ranks sees it."""

    stage: int
    """Number of the stage before the boundary."""
    peer: int
    """The other rank, by its number in `group`."""
    group: dist.ProcessGroup
    microbatches: int

    def send(self, tensor: torch.Tensor, kind: int, microbatch: int = 0) -> dist.P2POp:
        return self._operation(dist.isend, tensor, kind, microbatch)

    def receive(self, tensor: torch.Tensor, kind: int, microbatch: int = 0) -> dist.P2POp:
        return self._operation(dist.irecv, tensor, kind, microbatch)

    def _operation(self, call: Any, tensor: torch.Tensor, kind: int, microbatch: int) -> dist.P2POp:
        tag = (microbatch * _STAGES + self.stage) * (_GRADIENT + 1) + kind
        return dist.P2POp(call, tensor, group=self.group, group_peer=self.peer, tag=tag)


class _Recent(OrderedDict[int, _T]):
    """The values of the keys that were used last."""

    def find(self, key: int) -> _T | None:
        """Returns the value of a key, which counts as used now."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def keep(self, key: int, value: _T, most: int) -> _T:
        """Adds a value, and drops values of other keys, so that at most `most` are left."""
        self[key] = value
        while len(self) > most:
            self.popitem(last=False)
        return value


class ReceiveMemory:
    """Memory for the tensors of each microbatch, with the operations that receive them.

    Steps with results of the same form use the same memory. Only the most recent forms keep memory.
    """

    def __init__(self, boundary: Boundary, kind: int) -> None:
        self._boundary, self._kind = boundary, kind
        self._kept = _Recent[dict[int, list[dist.P2POp]]]()

    def operations(
        self, key: int, forms: Sequence[TensorForm], microbatch: int
    ) -> list[dist.P2POp]:
        """Returns the operations that receive the tensors of a microbatch. `key`: that of all
        tensors of this form."""
        kept = self._kept.find(key)
        if kept is None:
            kept = self._kept.keep(key, {}, _KEPT_BUFFERS)
        found = kept.get(microbatch)
        if found is None:
            found = kept[microbatch] = [self._operation(each, microbatch) for each in forms]
        for place, each in enumerate(found):
            # the program may have kept a value that it received in an earlier step
            if storage_uses(each.tensor) > _ALONE:
                found[place] = self._operation(forms[place], microbatch)
        return list(found)  # torch's schedules may clear the list after the receives

    def _operation(self, form: TensorForm, microbatch: int) -> dist.P2POp:
        memory = torch.empty(form.shape, dtype=form.dtype)
        return self._boundary.receive(memory, self._kind, microbatch)

    def tensors(self, key: int, microbatch: int) -> list[torch.Tensor]:
        """Returns the tensors that the operations of a microbatch have received."""
        return [each.tensor for each in self._kept[key][microbatch]]


class ResultSender:
    """Sends the results of a stage to the next rank, and receives their gradients."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary, self._known = boundary, _Recent[ResultForm]()
        self._memory = ReceiveMemory(boundary, _GRADIENT)
        self._form: ResultForm | None = None
        self._has_begun = False

    def restart(self) -> None:
        """Begins a step."""
        self._form, self._has_begun = None, False

    def sends(
        self, microbatch: int, tensors: Sequence[torch.Tensor] | None, form: ResultForm | None
    ) -> list[dist.P2POp]:
        """Returns the operations that send the results of a microbatch.

        `tensors`: None if the stage has failed. Then zeros are sent, or nothing if no microbatch
        of the step had results. `form`: that of all results of the step.
        """
        found: list[dist.P2POp] = []
        if not self._has_begun:
            self._has_begun = True
            self._form = None if tensors is None else form
            found += self._headers()
        if self._form is None:
            return found
        if tensors is None:
            tensors = [torch.zeros(each.shape, dtype=each.dtype) for each in self._form.tensors]
        send = self._boundary.send
        return found + [send(each.detach(), _RESULT, microbatch) for each in tensors]

    def _headers(self) -> list[dist.P2POp]:
        form, send = self._form, self._boundary.send
        count = self._boundary.microbatches * _FORM_SIZES
        if form is None:
            return [send(torch.tensor([0, count]), _HEADER)]
        is_new = self._known.find(form.digest) is None
        header = torch.tensor([form.digest, count + (len(form.text) if is_new else 0)])
        if not is_new:
            return [send(header, _HEADER)]
        self._known.keep(form.digest, form, _KEPT_FORMS)
        text = torch.frombuffer(bytearray(form.text), dtype=torch.uint8)
        return [send(header, _HEADER), send(text, _FORM)]

    def receives(self, microbatch: int) -> list[dist.P2POp]:
        """Returns the operations that receive the gradients of a microbatch's results."""
        if self._form is None:
            return []
        forms = [each for each in self._form.tensors if each.needs_gradient]
        return self._memory.operations(self._form.digest, forms, microbatch)

    def gradients(self, microbatch: int) -> list[torch.Tensor | None]:
        """Returns the received gradients; None for each result that needs none."""
        assert self._form is not None  # otherwise the stage has failed, and has no backward pass
        arrived = iter(self._memory.tensors(self._form.digest, microbatch))
        return [next(arrived) if each.needs_gradient else None for each in self._form.tensors]


class ResultReceiver:
    """Receives the results of the stage before from its rank, and sends their gradients."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary, self._known = boundary, _Recent[ResultForm]()
        self._memory = ReceiveMemory(boundary, _RESULT)
        self._header = torch.zeros(_HEADER_NUMBERS, dtype=torch.int64)
        self.restart()

    def restart(self) -> None:
        """Begins a step."""
        self._pending: Any = None
        self._first: int | None = None
        self._is_known = False
        self.form: ResultForm | None = None
        """The form of the results of this step; None if the stage before has failed."""

    def receives(self, microbatch: int) -> list[dist.P2POp]:
        """Returns the operations that receive the results of a microbatch.

        The first microbatch's results are received by `tensors`, because their form is not known.
        """
        if self._first is None:
            self._first = microbatch
            self._pending = begin(self._boundary.receive(self._header, _HEADER))
            return []
        return self._operations(microbatch)

    def tensors(self, microbatch: int) -> list[torch.Tensor] | None:
        """Returns the results of a microbatch; None if the stage before has failed."""
        if microbatch == self._first:
            for work in [begin(each) for each in self._operations(microbatch)]:
                work.wait()
        self._learn()
        return None if self.form is None else self._memory.tensors(self.form.digest, microbatch)

    def _operations(self, microbatch: int) -> list[dist.P2POp]:
        self._learn()
        if self.form is None:
            return []
        return self._memory.operations(self.form.digest, self.form.tensors, microbatch)

    def _learn(self) -> None:
        """Waits for the header of the step."""
        if self._is_known:
            return
        self._pending.wait()
        self._is_known = True
        digest, sizes = self._header.tolist()
        count, size = divmod(sizes, _FORM_SIZES)
        if count != self._boundary.microbatches:
            raise ValueError(
                f"stage {self._boundary.stage} of the pipeline divides the batch into {count} "
                f"microbatches, and the next stage into {self._boundary.microbatches}; pass the "
                "same number on every rank"
            )
        if size:
            text = torch.empty(size, dtype=torch.uint8)
            begin(self._boundary.receive(text, _FORM)).wait()
            self._known.keep(digest, ResultForm.from_text(bytes(text.tolist())), _KEPT_FORMS)
        self.form = self._known.find(digest) if digest else None

    def sends(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None] | None
    ) -> list[dist.P2POp]:
        """Returns the operations that send the gradients of a microbatch's results.

        `gradients`: one for each tensor; None counts as zero. None altogether: this stage failed.
        """
        if self.form is None:
            return []
        found = []
        for place, form in enumerate(self.form.tensors):
            gradient = None if gradients is None else gradients[place]
            if form.needs_gradient:
                if gradient is None:
                    gradient = torch.zeros(form.shape, dtype=form.dtype)
                found.append(self._boundary.send(gradient.contiguous(), _GRADIENT, microbatch))
        return found


def begin(operation: dist.P2POp) -> Any:
    """Begins a send or a receive."""
    peer = "group_dst" if operation.op is dist.isend else "group_src"
    return operation.op(
        operation.tensor,
        group=operation.group,
        tag=operation.tag,
        **{peer: operation.group_peer},
    )
