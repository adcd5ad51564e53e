"""The files of an adapter of peft, such as LoRA, which `PeftModel.from_pretrained` loads."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from unisono.parallel.checkpoint import TensorBlock

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
