"""Lists of different lengths, stored as two arrays. `values` has the elements of all lists one
after another. `starts` has the index of each list's first element, then the number of all
elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Ragged: TypeAlias = tuple[Ints, Ints]
"""Lists of different lengths as (values, starts). List i is values[starts[i]:starts[i + 1]]."""


def ints(values: Any) -> Ints:
    """Converts values to an array of int64.

    >>> ints([1, 2]).dtype.name
    'int64'
    """
    return np.asarray(values, dtype=np.int64)


def starts_of(counts: Ints) -> Ints:
    """Returns the `starts` of lists with these lengths: the start of each list, and the end of the
    last list.

    >>> starts_of(ints([2, 0, 1])).tolist()
    [0, 2, 2, 3]
    """
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def counting(counts: Ints) -> Ints:
    """Returns the index of each element within its list, for lists with these lengths.

    >>> counting(ints([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = starts_of(counts)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def take(lists: Ragged, which: Ints) -> Ragged:
    """Returns the lists with these indices, in the order of the indices.

    >>> values, starts = take((ints([5, 6, 7]), ints([0, 2, 3])), ints([1, 0, 1]))
    >>> values.tolist(), starts.tolist()
    ([7, 5, 6, 7], [0, 1, 3, 4])
    """
    values, starts = lists
    counts = starts[which + 1] - starts[which]
    return values[np.repeat(starts[which], counts) + counting(counts)], starts_of(counts)


def join(parts: Sequence[Ragged]) -> Ragged:
    """Concatenates lists with the same index: list i of the result is list i of the first part,
    then list i of the second part, and so on.

    >>> one, two = (ints([1, 2]), ints([0, 1, 2])), (ints([8, 9]), ints([0, 2, 2]))
    >>> [array.tolist() for array in join([one, two])]
    [[1, 8, 9, 2], [0, 3, 4]]
    """
    counts = [np.diff(starts) for _, starts in parts]
    starts = starts_of(np.sum(counts, axis=0))
    values = np.empty(starts[-1], dtype=np.int64)
    begin = starts[:-1].copy()
    for (found, _), count in zip(parts, counts, strict=True):
        values[np.repeat(begin, count) + counting(count)] = found
        begin += count
    return values, starts


def spread(lists: Ragged, which: Ints, total: int) -> Ragged:
    """Returns `total` lists: the given lists at the indices `which`, and empty lists at all other
    indices."""
    counts = np.zeros(total, dtype=np.int64)
    counts[which] = np.diff(lists[1])
    return lists[0], starts_of(counts)


def mix(*words: Ints | int) -> NDArray[np.uint64]:
    """Returns a hash of each row of words. The hash is equal on all machines.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014).
    """
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = state + np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def pick(count: Ints | int, *words: Ints | int) -> Ints:
    """Returns a number from 0 to `count` - 1, chosen by a hash of the words."""
    return (mix(*words) % np.asarray(count).astype(np.uint64)).astype(np.int64)


def distinct(keys: Ints) -> tuple[Ints, Ints]:
    """Returns the different keys in ascending order, and for each key its index among the different
    keys, like `np.unique`.

    Keys must not be negative. Dense keys are not sorted, which is faster.

    >>> [found.tolist() for found in distinct(ints([5, 3, 5, 5]))]
    [[3, 5], [1, 0, 1, 1]]
    """
    if len(keys) == 0 or int(keys.max()) >= 4 * len(keys):
        found, which = np.unique(keys, return_inverse=True)
        return ints(found), ints(which)
    there = np.zeros(int(keys.max()) + 1, np.bool_)
    there[keys] = True
    return ints(np.flatnonzero(there)), ints((np.cumsum(there) - 1)[keys])
