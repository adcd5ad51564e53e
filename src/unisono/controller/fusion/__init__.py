"""Fusion: which tensors share a message.

`buckets.py` has the rule, `fusion_times.py` the cost of a message. `fusion_tuner.py` looks for
better buckets (`fusion_choice.py`) by trials (`fusion_trial.py`, `trial_plan.py`).
"""
