"""Runs the command `unisono` as `python -m unisono`."""

from unisono.commands import main

main()
