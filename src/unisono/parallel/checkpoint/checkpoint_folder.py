"""The folder of checkpoints: a subfolder for each checkpoint, and the file `latest` with the name
of the newest complete one. The file is replaced when all blocks are on disk, and older checkpoints
are deleted after that, so the previous checkpoint stays readable if a save is killed.

An error of one rank is raised on all ranks, so that no rank waits for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

_LATEST, _EXTRA, _METADATA, _PREFIX = "latest", "extra.json", ".metadata", "checkpoint-"
_TOKEN = "token"
"""File that the first rank writes before a save. The others check that they see it."""
_SHOWN = 3  # problems that an error names
_FILES = (_EXTRA, "extra.new", _METADATA, ".metadata.tmp", _TOKEN, "token.new")
"""Files of a checkpoint's subfolder, besides the blocks in files of `.distcp`."""


def begin_checkpoint(folder: Path, group: dist.ProcessGroup | None = None) -> Path:
    """Returns a new subfolder, after a check that all ranks see the same one. Collective.

    Raises `ValueError` on all ranks if the first rank cannot make it, or if a rank does not see it.
    """
    begun = [_make_subfolder(folder) if is_first(group) else ("", "", "")]
    if dist.is_initialized():
        dist.broadcast_object_list(begun, group=group, group_src=0)
    name, token, problem = begun[0]
    path = folder / name
    try:
        seen = problem or (path / _TOKEN).read_text(encoding="utf-8") == token
    except OSError:
        seen = False
    unseen = (
        f"{folder.absolute()} is not the folder in which the group's first rank made {name}; save "
        "to a disk that all ranks share, and give the folder by its absolute path"
    )
    raise_on_all(problem or ("" if seen else unseen), group)
    if is_first(group):
        (path / _TOKEN).unlink()
    return path


def end_checkpoint(
    path: Path, extra: Mapping[str, Any], group: dist.ProcessGroup | None, *, keep: int = 1
) -> None:
    """Makes a checkpoint the newest one if all its files are complete, and deletes older ones but
    for `keep` in all. Collective.

    Raises `ValueError` on all ranks if the first rank cannot do this.
    """
    problem = ""
    if is_first(group):
        try:
            _write_synced(path / _EXTRA, json.dumps(dict(extra)))
            _checked(path)
            _write_synced(path.parent / _LATEST, path.name)
            _delete_older(path, keep)
        except (OSError, TypeError, ValueError) as error:
            problem = f"{path}: {error}"
    raise_on_all(problem, group)


def newest_checkpoint(folder: Path) -> tuple[Path, Metadata, dict[str, Any]]:
    """Returns the newest complete checkpoint of a folder, or a folder that is a checkpoint itself:
    its path, DCP's metadata and the values that `end_checkpoint` received as `extra`. Collective.

    The ranks may have copies of the checkpoint on disks that they do not share. Raises `ValueError`
    on all ranks unless each rank has a complete copy of the same checkpoint.
    """
    problem, found, digest = "", None, ""
    try:
        found, digest = _read(folder)
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # of a damaged file; the other ranks must not wait for this rank
        problem = f"{folder.absolute()}: {type(error).__name__}: {error}"
    raise_on_all(problem)
    first = from_all(digest)[0]
    differs = (
        f"{folder.absolute()} holds another checkpoint than on the group's first rank; load from a "
        "disk that all ranks share, or from complete copies of one checkpoint"
    )
    raise_on_all("" if digest == first else differs)
    assert found is not None
    return found


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def raise_on_all(problem: str, group: dist.ProcessGroup | None = None) -> None:
    """Raises `ValueError` on all ranks if one of them has a problem, with the first one and the
    ranks that have a problem. Collective.
    """
    raise_first(from_all(problem, group))


def raise_first(problems: Sequence[str]) -> None:
    """Raises `ValueError` with the first problem of all ranks, which all ranks know, and the ranks
    that have a problem."""
    ranks = [rank for rank, each in enumerate(problems) if each]
    if not ranks:
        return
    every = len(ranks) == len(problems)
    who = "" if every else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
    raise ValueError(who + problems[ranks[0]])


def require_fit(path: Path, problems: Sequence[str]) -> None:
    """Raises `ValueError` on all ranks if a rank has problems with the files. Collective.

    The error names the first problems of all ranks.
    """
    if every := list(dict.fromkeys(chain.from_iterable(from_all(problems)))):
        more = f"; {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
        raise ValueError(f"{path} does not fit: {'; '.join(every[:_SHOWN])}{more}")


def _make_subfolder(folder: Path) -> tuple[str, str, str]:
    """Returns the name of a new subfolder and the text of its token, or a problem."""
    token = secrets.token_hex()
    try:
        name = _next_name(folder)
        (folder / name).mkdir(parents=True)
        _write_synced(folder / name / _TOKEN, token)
    except OSError as error:
        return "", "", f"cannot save to {folder}: {error}"
    return name, token, ""


def _read(folder: Path) -> tuple[tuple[Path, Metadata, dict[str, Any]], str]:
    """Returns the newest checkpoint, and a digest by which ranks compare it. Raises `ValueError` if
    this rank does not see all of it, and warns if it takes an earlier one in its place."""
    if (folder / _METADATA).is_file():
        return _checked(folder)
    try:
        name = (folder / _LATEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"no checkpoint in {folder}: expected the file {_LATEST!r}") from None
    try:
        return _checked(folder / name, f"{folder / _LATEST} names {name!r}: ")
    except ValueError as error:
        for path in _own_folders(folder):
            if _number(path) < _number(folder / name) and _is_complete(path):
                warnings.warn(f"{error}; {path.name} is loaded in its place", stacklevel=2)
                return _checked(path)
        raise


def _checked(
    path: Path, who: str | None = None
) -> tuple[tuple[Path, Metadata, dict[str, Any]], str]:
    """Returns a checkpoint and a digest of it. Raises `ValueError` unless it has all its files, in
    the sizes that its metadata states. `who`: what names it."""
    expected = f"{f'{path}: ' if who is None else who}expected a complete checkpoint there, but "
    try:
        text = (path / _METADATA).read_bytes()
        metadata = FileSystemReader(path).read_metadata()
        sizes: dict[str, int] = {_EXTRA: 0}
        for stored in (metadata.storage_data or {}).values():
            end = stored.offset + stored.length
            sizes[stored.relative_path] = max(end, sizes.get(stored.relative_path, 0))
    except FileNotFoundError:
        raise ValueError(f"{expected}it has no file {_METADATA!r}") from None
    except Exception as error:  # of a damaged file
        kind = type(error).__name__
        raise ValueError(f"{expected}{_METADATA!r} cannot be read: {kind}: {error}") from None
    for file, size in sizes.items():
        if not (path / file).is_file():
            raise ValueError(f"{expected}it has no file {file!r}")
        if (path / file).stat().st_size < size:
            raise ValueError(f"{expected}it has less than {size} bytes of {file!r}")
    extra = json.loads((path / _EXTRA).read_text(encoding="utf-8"))
    return (path, metadata, extra), hashlib.sha256(text).hexdigest()


def _is_complete(path: Path) -> bool:
    try:
        _checked(path)
    except (OSError, ValueError):
        return False
    return True


def _delete_older(path: Path, keep: int) -> None:
    """Deletes the checkpoints before this one, and what interrupted saves have left, but for the
    `keep - 1` newest complete ones."""
    kept = 1
    for each in _own_folders(path.parent):
        if each.name == path.name:
            continue
        if kept < keep and _is_complete(each):
            kept += 1
            continue
        (each / _METADATA).unlink(missing_ok=True)  # from here on it is no complete checkpoint
        shutil.rmtree(each)


def _own_folders(folder: Path) -> list[Path]:
    """Returns the subfolders that hold only files of complete or interrupted saves, the newest
    first.

    Other programs use such names too, so other files must not be deleted.
    """
    found = [
        path
        for path in folder.glob(f"{_PREFIX}*")
        if path.is_dir() and all(map(_is_own_file, path.iterdir()))
    ]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    """Returns the number of a checkpoint's subfolder; -1 for another name."""
    word = path.name.removeprefix(_PREFIX)
    return int(word) if word.isdecimal() else -1


def _is_own_file(path: Path) -> bool:
    is_known = path.name in _FILES or path.suffix == ".distcp"
    return is_known and path.is_file()


def _next_name(folder: Path) -> str:
    newest = max(map(_number, folder.glob(f"{_PREFIX}*")), default=-1)
    return f"{_PREFIX}{newest + 1}"


def is_first(group: dist.ProcessGroup | None = None) -> bool:
    """Returns True on the group's first rank, and without groups."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _write_synced(path: Path, text: str) -> None:
    """Replaces a file atomically: after a crash it has either the old or the new text."""
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
