"""The fixture `outcome` for tests of the backend in worlds of ranks."""

# ruff: noqa: F401
from worlds.outcomes import outcome, pytest_generate_tests, worlds
