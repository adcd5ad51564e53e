"""Weights from a trainer to workers that come and go, through CPU memory.

The trainer makes a `WeightSender`, and each worker a `WeightReceiver` with the sender's address. A
worker may join or die between two updates, or in one: the others still get all weights.

>>> import threading
>>> import numpy as np
>>> from unisono.weight_transfer import WeightReceiver, WeightSender
>>> weights = {"layer.weight": np.arange(6.0).reshape(2, 3), "layer.bias": np.ones(3)}
>>> with WeightSender() as sender:
...     worker = WeightReceiver(sender.address)
...     update = threading.Thread(target=sender.send, args=(weights,))
...     update.start()
...     received = worker.receive()
...     update.join()
>>> received["layer.weight"].tolist()
[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
>>> worker.receive() is None  # the sender has been closed
True
"""

from unisono.weight_transfer.weight_receiver import WeightReceiver
from unisono.weight_transfer.weight_sender import WeightSender, WeightUpdate

__all__ = ["WeightReceiver", "WeightSender", "WeightUpdate"]
