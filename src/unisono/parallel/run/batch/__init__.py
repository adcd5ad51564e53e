"""The batch of a step: its parts by rank and microbatch, and the calls of a model with them."""
