"""The weights of a run in files that other programs read, such as those of Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unisono.parallel import checkpoint
from unisono.parallel.checkpoint import TensorBlock
from unisono.parallel.meta_weights import InitialValues
from unisono.parallel.run.adapter_files import AdapterFiles
from unisono.parallel.run.parameter_sets import HeldParameter
from unisono.parallel.run.rank_agreement import on_all_ranks
from unisono.parallel.run.run_state import model_blocks
from unisono.parallel.run.tied_parameters import find_ties
from unisono.parallel.training_mesh import TrainingMesh

_CONFIGS = ("config", "generation_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Facts about a whole model that an export needs, noted before the model is divided."""

    other_names: Mapping[str, tuple[str, ...]]
    """The further names of each parameter that has several."""
    architecture: str
    """The name of the model's class."""
    configs: Sequence[Any]
    """The configurations of a model of transformers."""
    adapter: AdapterFiles | None
    """The files of the adapter of a model of peft."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelFiles:
        """Notes the names and configurations of a model."""
        found = [getattr(model, name, None) for name in _CONFIGS]
        return cls(
            other_names={first: tuple(others) for first, *others in find_ties(model)},
            architecture=type(model).__name__,
            configs=[each for each in found if hasattr(each, "save_pretrained")],
            adapter=AdapterFiles.of(model),
        )

    def write_configs(self, folder: Path) -> None:
        """Writes the configurations, from which transformers makes the model."""
        for each in self.configs:
            written = copy.copy(each)
            if not getattr(written, "architectures", True):
                written.architectures = [self.architecture]
            written.save_pretrained(folder)


class RunWeights:
    """Exports and loads the parameters and buffers of a run under the model's own names."""

    def __init__(
        self,
        trained: Sequence[HeldParameter],
        frozen: Sequence[HeldParameter],
        modules: Sequence[nn.Module],
        mesh: TrainingMesh,
        files: ModelFiles,
    ) -> None:
        self._trained, self._frozen, self._modules = trained, frozen, modules
        self._mesh, self._files = mesh, files

    def export(self, folder: Path) -> None:
        """Writes files of safetensors and the model's configurations. Collective."""
        adapter = self._files.adapter
        if adapter is None:
            checkpoint.export_blocks(folder, self._blocks(), write_others=self._files.write_configs)
            return
        on_all_ranks(lambda: adapter.require_all([each.name for each in self._trained]))
        blocks = adapter.blocks(self._blocks())
        checkpoint.export_blocks(folder, blocks, write_others=adapter.write)

    def load(self, path: Path, *, is_whole: bool = False) -> None:
        """Fills this rank's part from files of safetensors. Collective.

        `is_whole`: the files must have all parameters, not those of an adapter alone."""
        adapter = None if is_whole else self._files.adapter
        file = None if adapter is None else adapter.file(path)
        if adapter is None or file is None:
            checkpoint.load_safetensors(path, self._blocks(), others=self._files.other_names)
        else:
            checkpoint.load_safetensors(file, adapter.blocks(self._blocks()), others={})

    def compute(self, initial: InitialValues, *, has_file: bool) -> None:
        """Fills this rank's part with the values of the model's initializers. Collective.
        `has_file`: a file has those of parameters and persistent buffers."""
        initial.fill(self._blocks(), self._modules, has_file=has_file)

    def _blocks(self) -> list[TensorBlock]:
        return model_blocks(self._trained, self._frozen, self._modules, self._mesh)
