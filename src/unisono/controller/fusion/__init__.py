"""Fusion: the choice of the tensors that share a message.

`buckets.py` has the fusion rule, and `fusion_times.py` the time of a message. `fusion_tuner.py`
searches for better buckets (`fusion_choice.py`) with trials (`fusion_trial.py`, `trial_plan.py`).
"""
