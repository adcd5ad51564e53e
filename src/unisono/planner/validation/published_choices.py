"""Choices of published runs that `data/training_runs.csv` leaves open, from their published scripts.

The table has only what a source's results state. The scripts that started the runs state more.
"""

from __future__ import annotations

from typing import NamedTuple


class PublishedChoices(NamedTuple):
    """Choices of a run. None: the scripts do not state this choice."""

    micro_batch: int | None = None
    vpp: int | None = None
    recompute: str | None = None


_NARAYANAN = {
    "GPT 1.7B": PublishedChoices(16, 1),
    "GPT 3.6B": PublishedChoices(16, 1),
    "GPT 7.5B": PublishedChoices(16, 1),
    "GPT 18.4B": PublishedChoices(8, 1),
    "GPT 39.1B": PublishedChoices(4, 1),
    "GPT 76.1B": PublishedChoices(2, 3),
    "GPT 145.6B": PublishedChoices(2, 2),
    "GPT 310.1B": PublishedChoices(1, 2),
    "GPT 529.6B": PublishedChoices(1, 3),
    "GPT 1008B": PublishedChoices(1, 1),
}
"""Micro batches and interleaving of table 1 (github NVIDIA/Megatron-LM,
examples/academic_paper_scripts/sc21/run_table_1.sh)."""

_SELECTIVE_DEVICES = ("H100-SXM5-80GB", "B200", "GB200")
"""Devices on which Megatron-Bridge computes norms and activations of GPT-OSS again, in 16 bits."""


def published_choices(source: str, model: str, device: str, precision: str) -> PublishedChoices:
    """Returns the choices of a run that its published scripts state.

    Megatron-Bridge computes nothing again, except the norms and activations of GPT-OSS on some
    devices (github NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs of v0.2.0 to v0.5.0 and
    src/megatron/bridge/perf_recipes of v0.6.0). If activations do not fit in memory, it moves some
    layers' activations to the host.
    """
    if source == "arXiv 2104.04473 table 1":
        return _NARAYANAN.get(model, PublishedChoices())
    if not source.startswith("Megatron-Bridge"):
        return PublishedChoices()
    wide = model.startswith("GPT OSS") and precision == "bf16"
    again = wide and device in _SELECTIVE_DEVICES
    return PublishedChoices(recompute="selective" if again else "none")
