"""Descriptions that a prediction begins with: model, devices, cluster, layout and workload.

They refuse combinations that no run can have (`layout_check.py`), and compute what follows from
the descriptions alone: FLOPs, layers of a stage, elements that tensor parallelism exchanges.
"""
