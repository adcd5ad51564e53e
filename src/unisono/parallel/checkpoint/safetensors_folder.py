"""Weights in files of safetensors, as Hugging Face's libraries read and write them.

DCP writes the blocks of all ranks and joins them into files of whole tensors, piece by piece. To
read, each rank takes its blocks out of the files.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from unisono.parallel.checkpoint.block_checkpoint import write_blocks
from unisono.parallel.checkpoint.checkpoint_folder import (
    begin_checkpoint,
    from_all,
    is_first,
    raise_on_all,
    require_fit,
)
from unisono.parallel.checkpoint.tensor_block import TensorBlock

_SUFFIX, _INDEX = ".safetensors", "model.safetensors.index.json"
_MOST_RANKS = 10**6
_OTHERS = f"model-others{_SUFFIX}"
_FILE_BYTES = 5 * 10**9
"""Largest sum of the tensors of a file; a larger tensor has a file of its own."""
_OPEN_BYTES = 2**26
"""Bytes of tensors that are read of a file before it is opened again."""
_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "C64": torch.complex64,
}  # fmt: skip
"""The types without floating point, by their names in safetensors."""


def export_blocks(
    folder: Path,
    blocks: Sequence[TensorBlock],
    *,
    write_others: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes blocks as files of safetensors, with whole tensors, and their index. Collective.

    No rank holds all tensors. Several ranks may pass the same block. `write_others` writes further
    files into the folder that it receives, on the group's first rank, or renames files. Weights
    that the folder had before are replaced when the new ones are complete.

    Raises `ValueError` on all ranks unless all see the same folder and can write.
    """
    path = begin_checkpoint(folder)
    writer = _Writer(
        path=str(path),
        fqn_to_index_mapping=_file_numbers(blocks),
        save_distributed=True,
        enable_consolidation=True,
    )
    arrays = [replace(b, values=b.values.contiguous()) for b in blocks if not _is_gathered(b)]
    gathered = _gathered(blocks)
    write_blocks(arrays, storage_writer=writer)
    problem = ""
    if is_first():
        try:
            _add(path, gathered)
            write_others(path)
            _move(path, folder)
        except (OSError, TypeError, ValueError) as error:
            problem = f"{folder}: {error}"
            shutil.rmtree(path, ignore_errors=True)
    raise_on_all(problem)


class _Writer(HuggingFaceStorageWriter):
    """Writes several blocks of a tensor into several files: a file of safetensors has each name
    once."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the blocks of this rank."""
        of_tensors: dict[str, list[WriteItem]] = {}
        for each in plan.items:
            of_tensors.setdefault(each.index.fqn, []).append(each)
        written: list[WriteResult] = []
        for place, items in enumerate(zip_longest(*of_tensors.values())):
            number = plan.storage_data["shard_index"] + place * _MOST_RANKS
            part = replace(
                plan,
                items=[each for each in items if each is not None],
                storage_data={**plan.storage_data, "shard_index": number},
            )
            written += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


def _file_numbers(blocks: Sequence[TensorBlock]) -> dict[str, int]:
    """Returns the number of the file of each tensor, from 1 on. Collective."""
    sizes = {
        each.name: math.prod(each.shape) * each.values.element_size()
        for each in blocks
        if not _is_gathered(each)
    }
    number, filled, found = 1, 0, dict[str, int]()
    every = {name: nbytes for one in from_all(sizes) for name, nbytes in one.items()}
    for name, nbytes in sorted(every.items()):
        if filled and filled + nbytes > _FILE_BYTES:
            number, filled = number + 1, 0
        filled += nbytes
        found[name] = number
    return found


def _is_gathered(block: TensorBlock) -> bool:
    """Returns True for a tensor that DCP would write as zeros, or could not write: one without
    dimensions or elements, or with another type than floating point."""
    is_float = block.values.is_floating_point()
    return not block.shape or not math.prod(block.shape) or not is_float


def _gathered(blocks: Sequence[TensorBlock]) -> dict[str, torch.Tensor]:
    """Returns the tensors of all ranks that DCP does not write. Collective.

    Raises `ValueError` on all ranks for a part of such a tensor, and for types that safetensors
    does not have.
    """
    own = {each.name: each for each in blocks if _is_gathered(each)}
    raise_on_all(next(filter(None, map(_problem_of, own.values())), ""))
    values = {name: each.values.detach().clone() for name, each in own.items()}
    return {name: each for found in from_all(values) for name, each in found.items()}


def _problem_of(block: TensorBlock) -> str:
    """Returns why a tensor that DCP does not write cannot be exported, else ''."""
    dtype = block.values.dtype
    if not dtype.is_floating_point and dtype not in _TYPES.values():
        return f"{block.name}: has {dtype}, which files of safetensors do not have"
    if tuple(block.values.shape) != block.shape:
        return f"{block.name}: has {dtype} and is divided; expected floating point"
    return ""


def _add(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Adds a file with these tensors."""
    if not tensors:
        return
    save_file(dict(tensors), path / _OTHERS)
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    if (path / _INDEX).exists():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
    index["metadata"]["total_size"] += sum(each.nbytes for each in tensors.values())
    index["weight_map"].update(dict.fromkeys(tensors, _OTHERS))
    (path / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _move(path: Path, folder: Path) -> None:
    """Puts the files of an export into its folder, in place of those of an earlier one."""
    shutil.rmtree(path / "sharded", ignore_errors=True)
    fresh = sorted(path.iterdir(), key=lambda each: each.name == _INDEX)  # the index last
    if path / _INDEX in fresh:
        (folder / _INDEX).unlink(missing_ok=True)
        for old in folder.glob(f"model-*{_SUFFIX}"):
            old.unlink()
    for each in fresh:
        each.replace(folder / each.name)
    path.rmdir()


def load_safetensors(
    path: Path,
    blocks: Sequence[TensorBlock],
    *,
    others: Mapping[str, Sequence[str]],
) -> None:
    """Fills the blocks from a file of safetensors, or from a folder of such files. Collective.

    `others`: further names of a tensor; a file may have the tensor under any of them.
    Floating-point values are converted to the type of the block. Each rank reads its blocks only.

    Raises `ValueError` on all ranks, before a block changes, if a tensor is missing or has another
    shape or kind of elements, or if the files have tensors that no rank has.
    """
    held = [each for each in blocks if each.values.numel()]
    unread, problems = "", list[str]()
    files, names = dict[str, Path](), dict[str, str]()
    try:
        files = _files_of(path)
        for each in held:
            possible = (each.name, *others.get(each.name, ()))
            names[each.name] = next((name for name in possible if name in files), each.name)
        problems = _problems(files, names, held)
    except (OSError, ValueError, SafetensorError) as error:
        unread = f"{path}: {error}"
    raise_on_all(unread)
    require_fit(path, problems)
    known = {name for own in from_all([each.name for each in blocks]) for name in own}
    known |= {each for name in known for each in others.get(name, ())}
    strangers = [
        f"has {name!r}, which this model does not have" for name in files if name not in known
    ]
    require_fit(path, strangers)
    with torch.no_grad():
        for file, block in _opened(files, names, held):
            block.values.copy_(_part(file, names[block.name], block))


def _files_of(path: Path) -> dict[str, Path]:
    """Returns the file of each tensor. Raises `ValueError` without files of safetensors."""
    index = path / _INDEX
    if index.is_file():
        weights: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: path / file for name, file in weights.items()}
    paths = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
    if not paths or not all(each.is_file() and each.suffix == _SUFFIX for each in paths):
        raise ValueError("expected a file of safetensors, or a folder with such files")
    found: dict[str, Path] = {}
    for each in paths:
        with safe_open(each, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), each))
    return found


def _problems(
    files: Mapping[str, Path], names: Mapping[str, str], blocks: Sequence[TensorBlock]
) -> list[str]:
    """Returns the differences between blocks and the tensors of the files, one each."""
    found = [f"has no tensor {each.name!r}" for each in blocks if names[each.name] not in files]
    present = [each for each in blocks if names[each.name] in files]
    for file, block in _opened(files, names, present):
        view = file.get_slice(names[block.name])
        shape, kind = tuple(view.get_shape()), view.get_dtype()
        is_float = kind.startswith(("F", "BF"))
        if shape != block.shape:
            found.append(f"{block.name}: expected the shape {block.shape}, got {shape}")
        elif is_float != block.values.is_floating_point() or (
            not is_float and _TYPES.get(kind) != block.values.dtype
        ):
            found.append(f"{block.name}: expected {block.values.dtype}, got {kind}")
    return found


def _opened(
    files: Mapping[str, Path], names: Mapping[str, str], blocks: Sequence[TensorBlock]
) -> Iterator[tuple[Any, TensorBlock]]:
    """Yields each block with the open file that has its tensor.

    A file stays open for few bytes: what has been read of it counts as memory of the process.
    """
    by_file: dict[Path, list[TensorBlock]] = {}
    for each in blocks:
        by_file.setdefault(files[names[each.name]], []).append(each)
    for path, members in by_file.items():
        waiting = members[::-1]
        while waiting:
            with safe_open(path, framework="pt") as file:
                nbytes = 0
                while waiting and nbytes < _OPEN_BYTES:
                    nbytes += math.prod(waiting[-1].shape) * waiting[-1].values.element_size()
                    yield file, waiting.pop()


def _part(file: Any, name: str, block: TensorBlock) -> torch.Tensor:
    """Returns a block's elements of a tensor."""
    if not block.shape:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    ends = zip(block.start, block.values.shape, strict=True)
    part: torch.Tensor = file.get_slice(name)[tuple(slice(a, a + n) for a, n in ends)]
    return part
