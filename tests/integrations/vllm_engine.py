"""A replica of vLLM as a process: `python vllm_engine.py FOLDER RANKS`.

Reads calls from its input, one a line as JSON: the method and its arguments. Answers each with a
line: RESULT and the outcome.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main(folder: str, ranks: int) -> None:
    """Serves calls until the input ends."""
    from small_llama import options, prompts

    more = {"enforce_eager": True, "weight_transfer_config": {"backend": "unisono"}}
    # in float32, replicas of other numbers of ranks generate the same tokens
    llm = LLM(folder, **{**options(ranks), "dtype": "float32", **more})
    choice = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)

    def tokens() -> list[list[int]]:
        done = llm.generate(prompts(3), choice, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            call = tokens if method == "tokens" else getattr(llm, method)
            answer = {"value": call(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
