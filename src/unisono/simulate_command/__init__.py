"""The command `unisono simulate`: `command` has the options; the others print what comes of it.

`league` compares algorithms, `what_if` varies a network, `searching` finds the fastest way.
"""

from unisono.simulate_command.command import simulate

__all__ = ["simulate"]
