"""The files of a run: checkpoints, and weights for other programs."""
