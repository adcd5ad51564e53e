"""The methods of a run that write and read files: checkpoints, and weights for other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono.parallel.checkpoint import PendingSave
from unisono.parallel.run.files.run_checkpoints import RunCheckpoints
from unisono.parallel.run.files.run_weights import RunWeights
from unisono.parallel.run.run_failure import RunEnd


class RunFiles:
    """The files of a run, and the number of steps, which they have."""

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        weights: RunWeights,
        end: RunEnd,
        *,
        loaded: Callable[[], None],
    ) -> None:
        """`loaded`: notes that a checkpoint has changed the run."""
        self._checkpoints, self._weights, self._end = checkpoints, weights, end
        self._loaded = loaded
        self.steps = 0
        """Number of steps so far."""
        self.average: Any = None  # the `WeightAverage` of the run

    def save(
        self,
        folder: Path | str,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int = 1,
        verify: bool = False,
    ) -> None:
        """Writes a checkpoint that a run of any layout can load. Collective.

        The checkpoint holds weights, buffers, optimizer states, the hyperparameters of the
        optimizer's groups (such as the learning rate), the buffers that the loss has written and
        the number of steps. It is a subfolder of `folder`, which keeps the `keep` newest complete
        checkpoints. Earlier ones are deleted after the new checkpoint is complete.

        `extra`: what else the program needs, by name: plain values, tensors, arrays of NumPy, and
        objects with `state_dict` and `load_state_dict`, such as schedulers and data loaders. A
        value may be None on ranks that do not have it. What is equal on all ranks can be loaded in
        any layout; what differs by data-parallel rank, in layouts with as many of them; what
        differs by rank, in the same layout.

        `verify`: each rank reads what it has written again and compares every element. Until then,
        the checkpoint does not count as complete.

        Raises `ValueError` on all ranks for other values, and if the ranks see different folders;
        `OSError` on all ranks if one cannot write or reads other values; `RuntimeError` on all
        ranks if an earlier asynchronous save has failed, and `PeerLostError` with the number of a
        rank that died.
        """
        self._require_weights("save")
        self._checkpoints.save(Path(folder), self.steps, extra, keep=keep, verify=verify)

    def async_save(
        self,
        folder: Path | str,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int = 1,
        verify: bool = False,
    ) -> PendingSave:
        """Copies the values of a checkpoint, and returns while a thread writes them. Collective.

        The arguments and errors are those of `save`. Of values that several ranks have, one rank
        makes a copy. The checkpoint is complete after `wait()` of the result. If the thread of a
        rank fails, the next step, save, load or `wait()` raises `RuntimeError` on all ranks; a
        step has changed no weights then. A save begins after the earlier one has ended. The
        interpreter waits for the thread at its end: until then, torch's default group must exist.
        """
        self._require_weights("async_save")
        return self._checkpoints.async_save(
            Path(folder), self.steps, extra, keep=keep, verify=verify
        )

    def load(self, folder: Path | str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Loads the newest complete checkpoint of a folder, or the checkpoint whose folder it is,
        from any layout of this model; returns what `save` received as `extra`. Collective.

        `extra`: the objects and tensors into which their states are put, under the same names. The
        result has these objects, and the saved value or state of every other name, also without
        `extra`. A name with the value None is left out.

        Raises `ValueError` on all ranks if the checkpoint is from another model or kind of
        optimizer, or if a value of `extra` does not fit this layout or its object, before the run
        changes; and `PeerLostError` with the number of a rank that died.
        """
        self._require_weights("load")
        self.steps, found = self._checkpoints.load(Path(folder), extra)
        self._loaded()
        return found

    def export(self, folder: Path | str) -> None:
        """Writes the whole model's parameters and buffers as files of safetensors, with an index.
        Collective.

        The names are those of the whole model. A parameter with several names is written under the
        first. For a model of transformers, the folder also gets its configuration, so that
        `from_pretrained` loads it. No rank holds all weights. Weights of an earlier export in the
        folder are replaced. Raises `ValueError` on all ranks unless all see the same folder, and
        `ModuleNotFoundError` without the package safetensors.
        """
        self._end.require_usable()
        self._weights.export(Path(folder))

    def load_weights(self, path: Path | str) -> None:
        """Loads parameters and buffers from a file of safetensors, or a folder of such files, under
        the names of the whole model. Collective.

        Each rank reads its part only. Optimizer states and the number of steps stay. Raises
        `ValueError` on all ranks, before anything changes, if names or shapes differ from those of
        the model, and `ModuleNotFoundError` without the package safetensors.
        """
        self._require_weights("load_weights")
        self._weights.load(Path(path))

    def _require_weights(self, call: str) -> None:
        """Raises if the run has ended, or if the averages are in place of its weights."""
        self._end.require_usable()
        if self.average is not None:
            self.average.require_weights(call)
