"""The command `unisono`: one module a subcommand. Heavy imports wait until a command runs."""

from unisono.commands.main import main

__all__ = ["main"]
