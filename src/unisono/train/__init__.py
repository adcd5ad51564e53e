"""Real models trained data-parallel through a chosen `torch.distributed` backend, and compared.

`settings`, `events`, `launch`, `progress`, `report` and `commands` belong to the parent process and
never import torch; `worker`, `loop`, `communication`, `digits` and `text` run on every rank.
"""
