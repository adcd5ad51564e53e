"""`python -m unisono` is the command `unisono`."""

from unisono.commands import main

main()
