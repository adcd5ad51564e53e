"""The command `unisono`: one module per subcommand. Slow imports happen only when a command
runs."""

from unisono.commands.main import main

__all__ = ["main"]
