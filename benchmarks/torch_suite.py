"""Runs torch's own tests of torch.distributed over Gloo, or over Unisono as its stand-in.

    python benchmarks/torch_suite.py --ranks 2            # both, and what the stand-in loses
    python benchmarks/torch_suite.py --ranks 2 --match barrier

The tests are those of `torch.testing._internal.distributed.distributed_test` in the installed
torch. They need the package expecttest. Ranks are forked, since each import of torch takes seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

_LIMIT_S = 60


def main() -> None:
    """Compares the tests that pass over Gloo with those that pass with the stand-in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--match", default="", help="a regular expression for the tests' names")
    parser.add_argument("--out", type=Path, help="run here, and write the outcome of each test")
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.write_text(json.dumps(outcomes(arguments.match)))
        return
    gloo, ours = (_run(served, arguments) for served in ("", "gloo"))
    print(f"{len(gloo)} tests with {arguments.ranks} ranks")
    for name, found in (("gloo", gloo), ("stand-in", ours)):
        counts = {kind: list(found.values()).count(kind) for kind in sorted(set(found.values()))}
        print(f"{name}: {counts}")
    lost = sorted(name for name in gloo if gloo[name] == "passed" and ours[name] != "passed")
    won = sorted(name for name in gloo if gloo[name] == "failed" and ours[name] == "passed")
    print(f"lost: {lost}\npass only with the stand-in: {won}")
    sys.exit(bool(lost))


def _run(replaced: str, arguments: argparse.Namespace) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "barrier").mkdir()
        (Path(folder) / "test_dir").mkdir()
        out = Path(folder) / "outcomes.json"
        variables = {
            **os.environ, "BACKEND": "gloo", "WORLD_SIZE": str(arguments.ranks),
            "TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571",
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "UNISONO_REPLACE": replaced,
        }  # fmt: skip
        command = [sys.executable, __file__, "--out", str(out), "--match", arguments.match]
        log = Path(f"build/torch_suite_{replaced or 'torch'}_{arguments.ranks}.log")
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as stream:
            subprocess.run(command, env=variables, stdout=stream, stderr=stream, check=True)
        found: dict[str, str] = json.loads(out.read_text())
        return found


def outcomes(match: str) -> dict[str, str]:
    """Returns passed, failed or skipped for each test of this process's backend."""
    case = _test_class()
    names = [
        name for name in unittest.TestLoader().getTestCaseNames(case) if re.search(match, name)
    ]
    found = {}
    for name in names:
        result = unittest.TestResult()
        case(name).run(result)
        kind = "passed" if result.wasSuccessful() else "failed"
        found[name] = "skipped" if result.skipped else kind
        print(f"OUTCOME {name} {found[name]}", flush=True)
        for _, text in (*result.failures, *result.errors):
            print(text, flush=True)
    return found


def _test_class() -> Any:
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_DEFAULT = _LIMIT_S
    common_distributed.TIMEOUT_OVERRIDE = {}

    bases: tuple[Any, ...] = (
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    )

    class ForkedRanks(*bases):  # type: ignore[misc]
        """torch's tests with forked ranks."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return ForkedRanks


if __name__ == "__main__":
    main()
