"""Data parallelism: every rank holds the model, and ranks average gradients or parameters.

`data_parallel_model.py` and `distributed_optimizer.py` average gradients at each step,
`local_sgd.py` and `diloco.py` average parameters after several steps. `sharded_optimizer.py`
divides the optimizer's states (ZeRO-1).
"""
