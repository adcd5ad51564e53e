"""Copies of blocks, which a checkpoint can write while training changes the originals.

DCP's own stager copies whole storages: all of a flat array of optimizer states, of which a rank
writes a part. Here a rank copies only the blocks that it writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import distributed as dist

from unisono.parallel.checkpoint.checkpoint_folder import from_all
from unisono.parallel.checkpoint.tensor_block import TensorBlock

_Key = tuple[str, tuple[int, ...]]


def staged_blocks(
    blocks: Sequence[TensorBlock], group: dist.ProcessGroup | None
) -> list[TensorBlock]:
    """Returns copies, in CPU memory, of the blocks that this rank writes. Collective.

    Of several ranks that pass the same block, the one with the fewest bytes so far writes it.
    """
    sizes = {(each.name, each.start): each.values.nbytes for each in blocks if each.values.numel()}
    ranks = from_all(sizes, group)
    holders: dict[_Key, list[int]] = {}
    for rank, found in enumerate(ranks):
        for key in found:
            holders.setdefault(key, []).append(rank)
    filled = [0] * len(ranks)
    mine = set[_Key]()
    own = dist.get_rank(group) if dist.is_initialized() else 0
    for key, who in sorted(holders.items(), key=lambda each: -ranks[each[1][0]][each[0]]):
        writer = min(who, key=lambda rank: filled[rank])
        filled[writer] += ranks[writer][key]
        if writer == own:
            mine.add(key)
    return [
        dataclasses.replace(each, values=each.values.detach().to("cpu", copy=True))
        for each in blocks
        if (each.name, each.start) in mine
    ]
