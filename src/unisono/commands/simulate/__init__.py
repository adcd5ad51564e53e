"""The command `unisono simulate`: `options` are its options.

`simulation_request` is what they ask for, `comparison` compares algorithms, `what_if` varies a
network, `search_result` prints a search.
"""

from unisono.commands.simulate.command import simulate

__all__ = ["simulate"]
