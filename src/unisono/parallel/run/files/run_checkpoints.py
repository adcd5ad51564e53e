"""Checkpoints of a training run, which runs with any layout of the same model can load."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist

from unisono.parallel.checkpoint import (
    BlockCheckpoint,
    PendingSave,
    TensorBlock,
    begin_checkpoint,
    open_checkpoint,
    raise_on_all,
    save_blocks,
    staged_blocks,
)
from unisono.parallel.precision import LossScaler, Precision
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.files.extra_state import ExtraState
from unisono.parallel.run.files.hyperparameters import (
    fitting_values,
    merged_names,
    save_groups,
    set_values,
)
from unisono.parallel.run.files.run_state import (
    arrays_of,
    begin_states,
    model_blocks,
    saved_states,
    state_blocks,
    state_name,
    states_of,
    weight_blocks,
)
from unisono.parallel.run.loss.loss_state import LossState
from unisono.parallel.training_mesh import TrainingMesh


class AsyncSaves:
    """The save of a run that a thread writes, and its error until the program knows it.

    The threads of the ranks communicate in a group of their own, so they do not disturb the calls
    of steps. An error of one rank ends the saves of all ranks.
    """

    def __init__(self, mesh: TrainingMesh) -> None:
        self._mesh = mesh
        self._group: dist.ProcessGroup | None = None
        self._pending: PendingSave | None = None

    def group(self) -> dist.ProcessGroup:
        """Returns the group of the threads. Collective."""
        if self._group is None:
            self._group = self._mesh.make_all_ranks()
            self._mesh.closing.append(self._close)
        return self._group

    def begin(self, path: Path, write: Callable[[], None]) -> PendingSave:
        """Starts a thread that writes the checkpoint `path`."""
        self._pending = PendingSave(path, write)
        return self._pending

    def finish(self) -> None:
        """Waits for the save. Collective.

        Raises `RuntimeError` on all ranks if it has failed and a rank does not know this yet.
        """
        if self._group is None:  # on all ranks
            return
        if self._pending is not None:
            self._pending.join()
        error = self._ended()
        problems = self._mesh.of_all_ranks("" if error is None else str(error))
        if error is not None:
            raise error
        if any(problems):
            raise RuntimeError(next(filter(None, problems)))

    def require_good(self) -> None:
        """Raises the error of a save that has failed, once. Other ranks may not know it yet."""
        if self._pending is not None and self._pending.done():
            error = self._ended()
            if error is not None:
                raise error

    def _ended(self) -> RuntimeError | None:
        """Returns the error of a save that has ended, unless the program knows it."""
        pending, self._pending = self._pending, None
        error = None if pending is None else pending.untold_failure()
        if pending is not None:
            pending.tell()
        return error

    def note(self, error: BaseException) -> None:
        """Notes an error of a step on all ranks. If it is that of the save, which another rank has
        found, this rank does not raise it again."""
        pending = self._pending
        if pending is not None and str(pending) in str(error):
            self._pending = None
            pending.tell()

    def _close(self) -> None:
        """Waits for the save, and destroys the group."""
        if self._pending is not None:
            self._pending.join()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class RunCheckpoints:
    """Saves and loads weights, buffers, optimizer states and hyperparameters of a run."""

    def __init__(self, model: DividedModel, loss: LossState, scaler: LossScaler) -> None:
        self._converts, self._scaler = model.precision != Precision(), scaler
        self._model, self._sets, self._trained = model, model.sets, model.trained
        self._optimizers, self._groups, self._mesh = model.optimizers, model.groups, model.mesh
        self._loss, self._extra = loss, ExtraState(model.mesh)
        self.asynchronous = AsyncSaves(model.mesh)

    def save(
        self, folder: Path, steps: int, extra: Mapping[str, Any] | None, *, keep: int, verify: bool
    ) -> None:
        """Writes a checkpoint after this number of steps. Collective."""
        self.asynchronous.finish()
        blocks, values, facts = self._content(steps, extra, keep)
        save_blocks(folder, blocks, values=values, extra=facts, keep=keep, verify=verify)

    def async_save(
        self, folder: Path, steps: int, extra: Mapping[str, Any] | None, *, keep: int, verify: bool
    ) -> PendingSave:
        """Copies what a checkpoint needs, and starts a thread that writes it. Collective."""
        begin_s = time.perf_counter()
        self.asynchronous.finish()
        group = self.asynchronous.group()
        blocks, values, facts = self._content(steps, extra, keep)
        path = begin_checkpoint(folder, self._mesh.all_ranks)
        copies = staged_blocks(blocks, self._mesh.all_ranks)

        def write() -> None:
            save_blocks(
                folder,
                copies,
                begun=path,
                values=values,
                extra=facts,
                keep=keep,
                verify=verify,
                group=group,
            )

        pending = self.asynchronous.begin(path, write)
        pending.blocked_s = time.perf_counter() - begin_s
        return pending

    def _content(
        self, steps: int, extra: Mapping[str, Any] | None, keep: int
    ) -> tuple[list[TensorBlock], Mapping[str, bytes], dict[str, Any]]:
        """Returns the blocks and values of this rank, and facts that are equal on all ranks.
        Collective."""
        problem = ""
        if type(keep) is not int or keep < 1:
            problem = f"keep: expected a number of checkpoints, 1 or more, got {keep!r}"
        given = self._extra.collect({} if extra is None else extra, problem)
        states = self._state_blocks()
        groups = save_groups(self._optimizers, self._groups)
        facts = {"steps": steps, "groups": groups, "kinds": self._kinds(), **given.facts}
        facts["scaler"] = self._scaler.state()
        return self._model_blocks() + self._loss.written() + states, given.values, facts

    def load(self, folder: Path, extra: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Loads the newest checkpoint of a folder; returns its number of steps, and the values that
        `save` received as `extra`. Collective.

        Raises `ValueError` on all ranks, before anything changes, if it does not fit.
        """
        self.asynchronous.finish()
        checkpoint = open_checkpoint(folder)
        begun = begin_states(self._optimizers)
        values, problems = fitting_values(checkpoint.extra["groups"], self._groups)
        try:
            checkpoint.require(self._model_problems(checkpoint))
            checkpoint.require(self._state_problems(checkpoint) + problems)
            given = self._extra.load(checkpoint, {} if extra is None else extra)
        except Exception:
            for parameter in begun:
                self._optimizers.forget(parameter)
            raise
        self._divide_sets(checkpoint.extra["kinds"])
        self._forget_states(checkpoint)
        states = self._state_blocks()
        blocks = self._model_blocks() + self._loss.saved(checkpoint.tensors)
        checkpoint.load(blocks + states)
        for group, found in zip(self._optimizers.groups, values, strict=True):
            set_values(group, found)
        self._scaler.load(checkpoint.extra.get("scaler", {}))
        return int(checkpoint.extra["steps"]), given

    def _model_blocks(self) -> list[TensorBlock]:
        return model_blocks(self._trained, self._model.frozen, self._model.modules, self._mesh)

    def _state_blocks(self) -> list[TensorBlock]:
        """Returns the optimizer states of this rank. Collective.

        Raises `ValueError` on all ranks for states that a rank cannot save.
        """
        blocks, problem = list[TensorBlock](), ""
        try:
            blocks = state_blocks(self._sets, self._optimizers, self._mesh)
        except ValueError as error:
            problem = str(error)
        raise_on_all(problem, self._mesh.all_ranks)
        return blocks

    def _model_problems(self, checkpoint: BlockCheckpoint) -> list[str]:
        """Returns what differs between the checkpoint and this model. Collective."""
        model = self._model_blocks() + self._loss.saved(checkpoint.tensors)
        held = self._mesh.of_all_ranks([each.name for each in model])
        known = {name for names in held for name in names}
        states = saved_states(checkpoint.tensors)
        known |= {state_name(name, each) for name, found in states.items() for each in found}
        others = [name for name in checkpoint.tensors if name not in known]
        problems = checkpoint.problems(model, converts=self._converts)
        problems += [f"has {name!r}, which this model does not have" for name in others]
        return problems

    def _state_problems(self, checkpoint: BlockCheckpoint) -> list[str]:
        """Returns what differs between the states of the checkpoint and of this optimizer.
        Collective.
        """
        blocks = self._state_blocks()
        model = weight_blocks(self._trained, self._mesh)
        own = saved_states([each.name for each in [*model, *blocks]])
        saved = saved_states(checkpoint.tensors)
        expected = dict(own)
        if not own and any(group["params"] for group in self._optimizers.groups):
            expected = {name: set() for names in self._groups for name in names}
        problems = [
            f"{name}: expected the optimizer states {_text(states)}, got {_text(saved[name])}"
            for name, states in expected.items()
            if name in saved and saved[name] != states
        ]
        taken = checkpoint.extra["steps"] - checkpoint.extra.get("scaler", {}).get("skipped", 0)
        if own and not saved and taken > 0:
            name, states = next(iter(own.items()))
            problems.append(f"{name}: expected the optimizer states {_text(states)}, got none")
        of_saved = {state_name(name, each) for name, states in saved.items() for each in states}
        fitting = [each for each in blocks if each.name in of_saved]
        return problems or checkpoint.problems(fitting, converts=self._converts)

    def _kinds(self) -> list[list[str]]:
        """Returns the parameters of all ranks, divided by their scalar states. Collective.

        These states, such as Adam's step, count the steps that used the parameter. Parameters of
        different kinds need different arrays in the optimizer.
        """
        own: dict[str, list[str]] = {}
        for held, array in (pair for each in self._sets for pair in arrays_of(each)):
            states = states_of(self._optimizers, array)
            scalars = {name: float(each) if each.dim() == 0 else 0.0 for name, each in states}
            own.setdefault(json.dumps(scalars, sort_keys=True), []).append(held.name)
        return list(merged_names(list(own.items())).values())

    def _divide_sets(self, kinds: Sequence[Sequence[str]]) -> None:
        """Gives the optimizers different arrays for parameters of different kinds."""
        kind_of = {name: number for number, names in enumerate(kinds) for name in names}
        for each in self._sets:
            each.divide([kind_of.get(held.name) for held in each.held], self._optimizers)

    def _forget_states(self, checkpoint: BlockCheckpoint) -> None:
        """Removes the states of parameters that no step before the checkpoint used."""
        saved = saved_states(checkpoint.tensors)
        for each in self._sets:
            for held, array in arrays_of(each):
                if held.name not in saved:
                    self._optimizers.forget(array)


def _text(states: set[str]) -> str:
    return ", ".join(sorted(states)) or "none"
