"""The parameters of a rank: their gradients, their division by ZeRO, and their optimizers."""
