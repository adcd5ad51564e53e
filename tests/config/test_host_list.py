"""Slurm's lists of hosts, compared with the output of `scontrol show hostnames`."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config.host_list import hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", "login"),
        ("n1,n2", "n1 n2"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[99-101]", "n99 n100 n101"),
        ("n[001,2]", "n001 n2"),
        ("a[1-2]b[3-4]c", "a1b3c a1b4c a2b3c a2b4c"),
        ("[1-2]", "1 2"),
        ("gpu-a[1-2].cluster.example,cpu[5]", "gpu-a1.cluster.example gpu-a2.cluster.example cpu5"),
    ],
)
def test_host_lists_are_expanded(text: str, expected: str) -> None:
    assert list(hosts(text)) == expected.split()


def test_names_are_made_lazily() -> None:
    assert next(hosts("n[000000000-999999999]")) == "n000000000"
    assert len(list(itertools.islice(hosts("a[0-9999999]b[0-9999999]"), 5))) == 5


@pytest.mark.parametrize(
    "text", ["", ",", "n1,", "n[", "n]", "n[]", "n[1-]", "n[-1]", "n[3-1]", "n[1-2-3]", "n[a]",
             "n[1,]", "n 1", "n[[1]]", "n[1-2"]
)  # fmt: skip
def test_invalid_lists_are_refused_before_the_first_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of hosts|not a range of hosts"):
        hosts(text)


PREFIXES = st.text("abcn-._", min_size=1, max_size=4)
RANGES = st.tuples(st.integers(0, 120), st.integers(0, 6), st.integers(1, 4))


@given(st.lists(st.tuples(PREFIXES, st.lists(RANGES, max_size=3)), min_size=1, max_size=4))
def test_written_lists_are_read(entries: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    texts, expected = [], []
    for prefix, ranges in entries:
        parts = []
        names = [] if ranges else [prefix]
        for first, more, width in ranges:
            numbers = [f"{number:0{width}}" for number in range(first, first + more + 1)]
            start = f"{first:0{width}}"
            parts.append(start if not more else f"{start}-{first + more}")
            names += [f"{prefix}{number:>0{len(start)}}" for number in numbers]
        texts.append(prefix + (f"[{','.join(parts)}]" if parts else ""))
        expected += names
    assert list(hosts(",".join(texts))) == expected


@given(st.text("n1-9[],a ", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = hosts(text)
    except ValueError:
        return
    assert all(name and "[" not in name for name in itertools.islice(found, 50))
