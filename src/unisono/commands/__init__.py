"""The command `unisono`, with one module per subcommand. Slow imports are done only when a command
runs."""

from unisono.commands.main import main

__all__ = ["main"]
