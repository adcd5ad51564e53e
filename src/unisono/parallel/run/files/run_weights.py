"""The weights of a run in files that other programs read, such as Hugging Face's and peft."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from unisono.parallel import checkpoint
from unisono.parallel.checkpoint import TensorBlock
from unisono.parallel.meta_weights import InitialValues
from unisono.parallel.run.files.run_state import model_blocks
from unisono.parallel.run.parameters.parameter_sets import HeldParameter
from unisono.parallel.run.parameters.tied_parameters import find_ties
from unisono.parallel.run.rank_agreement import on_all_ranks
from unisono.parallel.training_mesh import TrainingMesh

_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFiles:
    """Facts about a model of peft that an export needs, noted before the model is divided."""

    configs: Mapping[str, Any]
    """The configuration of each adapter, by its name."""
    names: Mapping[str, str]
    """The names of the adapter's tensors in its file, by their names in the model."""
    computed: Sequence[str]
    """The names of tensors in the adapter's file that are not the model's, but computed of them."""

    @classmethod
    def of(cls, model: nn.Module) -> AdapterFiles | None:
        """Notes the adapter of a model; returns None for a model without one."""
        peft: Any = sys.modules.get("peft")  # a model of peft has imported it
        if peft is None or not isinstance(model, getattr(peft, "PeftModel", ())):
            return None
        configs: Mapping[str, Any] = dict(cast(Any, model).peft_config)
        known = model.state_dict(keep_vars=True)
        numbers = {id(each): name for name, each in known.items()}
        found = peft.get_peft_model_state_dict(
            model, state_dict=known, adapter_name=next(iter(configs)), save_embedding_layers=False
        )
        own = {name: numbers[id(each)] for name, each in found.items() if id(each) in numbers}
        return cls(
            configs=configs,
            names={in_model: name for name, in_model in own.items()},
            computed=[name for name in found if name not in own],
        )

    def require_all(self, trained: Sequence[str]) -> None:
        """Raises `ValueError` if the file would not have all trained parameters."""
        if len(self.configs) > 1:
            raise ValueError(
                f"export: expected a model with one adapter, got {', '.join(self.configs)}; "
                "model.delete_adapter(name) before parallelize works"
            )
        for name in self.computed:
            raise ValueError(
                f"export: {name} of the adapter's file is computed of several parameters, which a "
                "rank may not have; expected LoRA with modules_to_save alone"
            )
        for name in trained:
            if name not in self.names:
                raise ValueError(
                    f"export: {name} is trained, but is no part of the adapter, of which peft "
                    "makes a file; expected modules_to_save with its module in the adapter's "
                    "configuration, or requires_grad_(False)"
                )

    def blocks(self, blocks: Sequence[TensorBlock]) -> list[TensorBlock]:
        """Returns the adapter's blocks, under their names in its file."""
        return [
            replace(each, name=self.names[each.name]) for each in blocks if each.name in self.names
        ]

    def file(self, path: Path) -> Path | None:
        """Returns the file of an adapter at a path; None if there are other files."""
        found = path / _FILE if path.is_dir() else path
        return found if found.name == _FILE and found.is_file() else None

    def write(self, folder: Path) -> None:
        """Writes the configuration into a folder, and gives the file of the weights its name."""
        first, *others = folder.glob("model-*.safetensors")
        if others:
            raise ValueError(
                "export: the adapter has more than 5 GB, but peft loads one file; a smaller rank "
                "of the adapter works"
            )
        first.rename(folder / _FILE)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        (config,) = self.configs.values()
        written = copy.copy(config)
        written.inference_mode = True  # as peft saves it
        written.save_pretrained(folder)


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
