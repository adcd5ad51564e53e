"""The command `unisono simulate`. `options` has the options of the command.

`simulation_request` converts options to a simulation. `comparison` compares algorithms, `sweep`
varies a parameter, `search_result` prints a search, and `pipeline` simulates the file of a pipeline
schedule.
"""

from unisono.commands.simulate.command import simulate

__all__ = ["simulate"]
