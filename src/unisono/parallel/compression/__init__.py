"""Compressed gradient exchanges: narrow floats, int8, top-k and PowerSGD."""
