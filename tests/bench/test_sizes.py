from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.bench.sizes import format_size, parse_size, parse_sizes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8", 8), ("64K", 65_536), ("1.5M", 1_572_864), ("2g", 2 << 30), ("16MiB", 16 << 20)],
)
def test_units_are_powers_of_two(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "K", "-8", "8T", "1.3", "0.0001K", "8 8"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


def test_lists_and_ranges() -> None:
    assert parse_sizes("8,1K:16K:x4,3") == (8, 1024, 4096, 16_384, 3)
    assert parse_sizes("8:64") == (8, 16, 32, 64)
    assert parse_sizes("8:64M:x8")[-1] == 16 << 20


@pytest.mark.parametrize("text", ["8:4", "8:16:x1", "8:16:fast", "0:8", "1:2:3:4"])
def test_invalid_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="range"):
        parse_sizes(text)


@given(st.integers(min_value=0, max_value=1 << 40))
def test_formatted_sizes_parse_to_the_same_value(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
