"""`python -m unisono` is the command `unisono`."""

from unisono.cli import main

main()
