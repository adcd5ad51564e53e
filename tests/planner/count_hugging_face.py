"""Counts the parameters of the configurations in hugging_face_counts.jsonl with transformers 5.24.

`python tests/planner/count_hugging_face.py` (needs torch and transformers) writes the file again.
Each line has a model's name, its configuration, and the parameters of the causal language model on
the meta device. `counted_as` is the configuration that is counted instead, for models whose code is
beside their weights, and whose layers are those of another type. Such a model without `counted_as`
keeps the parameters of its card.
"""

from __future__ import annotations

import json
from pathlib import Path

COUNTS = Path(__file__).with_name("hugging_face_counts.jsonl")


def main() -> None:
    """Writes the counts again."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    lines = []
    for line in COUNTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "card" not in entry:
            config = AutoConfig.for_model(**entry.get("counted_as", entry["config"]))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            entry["parameters"] = sum(each.numel() for each in model.parameters())
        lines.append(json.dumps(entry))
    COUNTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
