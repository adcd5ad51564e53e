"""Inputs of a prediction: model, devices, cluster, layout and workload.

This package rejects impossible combinations of inputs (`layout_check.py`). It also computes values
that depend on the inputs alone: FLOPs, layers of a stage, and elements that tensor parallelism
exchanges.
"""
