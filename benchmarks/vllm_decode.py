"""The time of a token of vLLM on CPUs with tensor parallelism: over Unisono, over vLLM's own shared
memory, and over Gloo.

    build/integrations/vllm/bin/python benchmarks/vllm_decode.py --ranks 2 --out n2.json

The environment is that of `make integrations FRAMEWORKS=vllm`. Each contestant is an engine of vLLM
with the same small Llama. The engines take turns; an engine without work sleeps. Each round starts
them anew, because engines of one kind differ by 10 %. The tokens of all must be equal
(`--any-tokens`: Gloo adds 4 ranks in another order). The times are those of steps that decode one
token of each sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAMS = HERE / "integrations" / "programs"
CONTESTANTS = ("unisono", "shared memory", "gloo")
WARM_UP = 4
"""Steps at the start of a turn whose times are not counted: the prompts, and the wake-up."""
PAUSE_S = 2.0
"""Until an engine without work sleeps."""
MODEL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1024,
}  # fmt: skip
GLOO_ONLY = """
def register():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
"""


def contestant(folder: str, ranks: int, eager: bool) -> None:
    """Generates as often as the input has lines; prints the tokens and step times of each turn."""
    from small_llama import options
    from vllm import LLM
    from vllm_program import generated, served_by

    llm = LLM(folder, **options(ranks), enforce_eager=eager)
    found: Any = llm.collective_rpc(served_by)
    for line in sys.stdin:
        sequences, tokens = json.loads(line)
        texts, times = generated(llm, sequences, tokens)
        print("RESULT " + json.dumps([found, texts, times]), flush=True)


class Engine:
    """A contestant's process."""

    def __init__(self, name: str, folder: str, options: argparse.Namespace, plugin: str) -> None:
        self.name = name
        variables = {
            **os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": options.bind,
            "PYTHONPATH": f"{PROGRAMS}:{plugin}" if name == "gloo" else str(PROGRAMS),
        }  # fmt: skip
        variables.pop("UNISONO_REPLACE", None)
        if name == "unisono":
            variables["UNISONO_REPLACE"] = "gloo"
        command = [sys.executable, __file__, "--ranks", str(options.ranks), "--folder", folder]
        command += ["--eager"] if options.eager else []
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self, sequences: int, tokens: int) -> tuple[list[list[int]], list[float]]:
        """Returns the tokens and the times of the steps of one turn."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([sequences, tokens]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                served, texts, times = json.loads(line.removeprefix("RESULT "))
                expected = "unisono" if self.name == "unisono" else "torch"
                assert set(served) == {expected}, (self.name, served)
                return texts, times[WARM_UP:]
        raise SystemExit(f"the engine of {self.name} has ended")

    def close(self) -> None:
        """Ends the engine."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def write_plugin(folder: Path) -> None:
    """Writes a plug-in of vLLM that turns its shared memory off, so that Gloo remains."""
    information = folder / "gloo_only-1.dist-info"
    information.mkdir(parents=True)
    (folder / "gloo_only.py").write_text(GLOO_ONLY)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo_only\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ngloo_only = gloo_only:register\n"
    )


def compare(options: argparse.Namespace) -> None:
    """Measures the contestants in turn; prints the results, and writes them to `--out`."""
    sys.path.insert(0, str(PROGRAMS))
    from small_llama import save

    with tempfile.TemporaryDirectory() as temporary:
        plugin = Path(temporary) / "plugin"
        write_plugin(plugin)
        folder = save(Path(temporary) / "model", **MODEL)
        times: dict[str, list[list[float]]] = {name: [] for name in options.contestants}
        expected: list[list[list[int]]] = []
        for number in range(options.rounds):
            first = number % len(options.contestants)
            names = options.contestants[first:] + options.contestants[:first]
            engines = [Engine(name, folder, options, str(plugin)) for name in names]
            try:
                take_turns(engines, options, expected, times)
            finally:
                for each in engines:
                    each.close()
    found = results(options, times)
    report(found, os.getloadavg()[0])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def take_turns(
    engines: list[Engine],
    options: argparse.Namespace,
    expected: list[list[list[int]]],
    times: dict[str, list[list[float]]],
) -> None:
    """Adds the step times of some turns of each engine. The first turn is not counted."""
    for turn in range(options.turns + 1):
        for each in engines[turn % len(engines) :] + engines[: turn % len(engines)]:
            texts, found = each.turn(options.sequences, options.tokens)
            if not expected:
                expected.append(texts)
            if texts != expected[0]:
                print(f"{each.name}: other tokens in turn {turn}", flush=True)
                if options.exact:
                    raise SystemExit(1)
            if turn:
                times[each.name].append(found)
            time.sleep(PAUSE_S)


def results(options: argparse.Namespace, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Returns the times of a token, and the ratios of medians turn by turn."""
    ours = [statistics.median(one) for one in times.get("unisono", [])]
    found: dict[str, Any] = {}
    for name, turns in times.items():
        every = [1e3 * each for one in turns for each in one]
        tenths = statistics.quantiles(every, n=10)
        found[name] = {
            "median_ms": statistics.median(every), "mean_ms": statistics.mean(every),
            "low_ms": tenths[0], "high_ms": tenths[-1], "turns": len(turns),
            "ratios": [statistics.median(one) / own for one, own in zip(turns, ours, strict=False)],
        }  # fmt: skip
    nbytes = options.sequences * MODEL["hidden_size"] * 2
    return {
        "ranks": options.ranks, "nbytes": nbytes, "sequences": options.sequences,
        "tokens": options.tokens, "rounds": options.rounds, "libraries": found,
    }  # fmt: skip


def report(found: dict[str, Any], load: float) -> None:
    """Prints the results."""
    print(
        f"{found['ranks']} ranks, all_reduce of {found['nbytes'] / 1024:.0f} KiB, load {load:.2f}"
    )
    for name, row in found["libraries"].items():
        text = f"{name:14} {row['median_ms']:7.2f} ms a token"
        print(f"{text} ({row['low_ms']:.2f} to {row['high_ms']:.2f}), mean {row['mean_ms']:.2f}")
        if name != "unisono" and (ratios := row["ratios"]):
            print(
                f"{name} / unisono: {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


def main() -> None:
    """Compares the contestants, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="each starts the engines anew")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bind", default="nobind", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--any-tokens", dest="exact", action="store_false")
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        contestant(options.folder, options.ranks, options.eager)
    else:
        compare(options)


if __name__ == "__main__":
    main()
