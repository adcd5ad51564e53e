"""The time of a training step: operators, exchanges, layers, the update, and their sum."""
