"""vLLM generates tokens with a small Llama, whose layers are divided among the ranks.

python vllm_program.py RANKS    # UNISONO_REPLACE=gloo: over Unisono, else vLLM's shared memory
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from small_llama import options, prompts, save
from vllm import LLM, SamplingParams

TOKENS = 64
"""Tokens that each sequence gets."""
SEQUENCES = 4


def served_by(worker: Any) -> str:
    """Returns the library of a worker's tensor parallelism."""
    from vllm.distributed.parallel_state import get_tp_group

    calls = get_tp_group().device_communicator.dist_module
    return "unisono" if type(calls).__module__.startswith("unisono") else "torch"


def generated(llm: LLM, sequences: int, tokens: int) -> tuple[list[list[int]], list[float]]:
    """Returns the tokens of all sequences, the most probable ones, and the time of each step."""
    choice = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts(sequences)):
        llm.llm_engine.add_request(str(number), prompt, choice)
    found: dict[str, list[int]] = {}
    ends = [time.perf_counter()]
    while llm.llm_engine.has_unfinished_requests():
        done = [each for each in llm.llm_engine.step() if each.finished]
        ends.append(time.perf_counter())
        found.update({each.request_id: list(each.outputs[0].token_ids) for each in done})
    times = [end - begin for begin, end in itertools.pairwise(ends)]
    return [found[name] for name in sorted(found)], times


def main(ranks: int) -> None:
    """Prints the tokens and the step times."""
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(save(Path(folder)), **options(ranks))
    libraries = set(llm.collective_rpc(served_by))
    tokens, times = generated(llm, SEQUENCES, TOKENS)
    record = {
        "served_by": libraries.pop(),
        "losses": list(itertools.chain.from_iterable(tokens)),
        "step_s": times,
    }
    assert not libraries, libraries
    print("RESULT " + json.dumps(record), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
