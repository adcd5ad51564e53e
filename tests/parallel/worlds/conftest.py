"""The fixture `outcome` for training in worlds of ranks."""

# ruff: noqa: F401
from worlds.outcomes import outcome, pytest_generate_tests, worlds
