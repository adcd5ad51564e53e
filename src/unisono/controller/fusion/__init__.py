"""Fusion: the choice of the tensors that share a message.

`buckets.py` has the fusion rule. `fusion_times.py` computes the time of messages. `fusion_tuner.py`
searches for better buckets (`fusion_choice.py`) with trials (`fusion_trial.py`, `trial_plan.py`).
"""
