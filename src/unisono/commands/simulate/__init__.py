"""The command `unisono simulate`: `command` has the options, the other modules print the results.

`comparison` compares algorithms, `what_if` varies a network, `search_result` prints a search.
"""

from unisono.commands.simulate.command import simulate

__all__ = ["simulate"]
