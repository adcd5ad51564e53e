"""Judges random cases: `PYTHONPATH=tests python -m random_models --seed 7`, or `--seconds 3600`."""

from __future__ import annotations

import argparse
import collections
import json
import re
import time
from pathlib import Path

from random_models.case import Case
from random_models.draw import cases, draw_case
from random_models.found import FOUND
from random_models.judge import Verdict, judge
from random_models.models import make_model
from random_models.shrink import shrink
from random_models.singles import singles

_SHRUNK = 2
"""Number of cases with one error that are made smaller."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="judge the case of this seed, and print it")
    parser.add_argument("--case", help="judge a case given as JSON, and print it")
    parser.add_argument("--found", action="store_true", help="judge all cases of found.py")
    parser.add_argument("--singles", action="store_true", help="one unusual thing a case")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    parser.add_argument("--step", type=int, default=1, help="take each n-th seed")
    parser.add_argument("--cases", type=int, default=10**9, help="number of cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--without", default="", help="skip cases with these names")
    parser.add_argument("--shrink", action="store_true", help="also look for smaller cases")
    parser.add_argument("--faults", type=Path, help="file to which faults are added, as JSON lines")
    given = parser.parse_args()
    if given.found:
        for name, case in FOUND.items():
            print(f"{name}: {judge(case)}\n  {case.to_json()}", flush=True)
    elif given.seed is not None or given.case is not None:
        case = Case.from_json(given.case) if given.case else draw_case(given.seed)
        _show(case, shrinks=given.shrink)
    else:
        _many(given)


def _show(case: Case, *, shrinks: bool) -> None:
    print(case.to_json())
    print(make_model(case))
    verdict = judge(case)
    print(verdict)
    if shrinks and verdict.is_fault:
        case, verdict = shrink(case, verdict)
        print(f"smaller: {case.to_json()}\n{verdict}")


def _many(given: argparse.Namespace) -> None:
    begin, counts = time.monotonic(), collections.Counter[str]()
    seen, without = collections.Counter[str](), set(given.without.split(","))
    for seed, case in enumerate(singles()) if given.singles else cases(given.first):
        if (
            seed < given.first
            or seed % given.step != given.first % given.step
            or _names(case) & without
        ):
            continue
        if counts.total() >= given.cases or time.monotonic() - begin > given.seconds:
            break
        verdict = judge(case)
        counts[verdict.kind] += 1
        if verdict.is_fault:
            shape = _shape(verdict)
            seen[shape] += 1
            _report(seed, case, verdict, given, shrinks=given.shrink and seen[shape] <= _SHRUNK)
        elif verdict.kind == "refused" and given.faults:
            with given.faults.with_suffix(".refusals").open("a") as file:
                file.write(f"{seed} {verdict.detail}\n")
    print(f"{counts.total()} cases in {time.monotonic() - begin:.0f} s:", dict(counts))


def _names(case: Case) -> set[str]:
    """Returns the names of everything unusual in a case."""
    others = (case.container, case.head, case.loss, case.habit, case.optimizer, case.inputs)
    flags = [name for name in ("autocast", "resumed", "example") if getattr(case, name)]
    return {*case.blocks, *others, *flags, *case.layout.split(",")}


def _shape(verdict: Verdict) -> str:
    """Returns the text of an error without numbers, to count equal faults."""
    return re.sub(r"[-\d.]+", "N", str(verdict))[:120]


def _report(
    seed: int, case: Case, verdict: Verdict, given: argparse.Namespace, *, shrinks: bool
) -> None:
    if shrinks:
        case, verdict = shrink(case, verdict)
    print(f"seed {seed}: {verdict}\n  {case.to_json()}", flush=True)
    if given.faults:
        line = {"seed": seed, "kind": verdict.kind, "detail": verdict.detail}
        with given.faults.open("a") as file:
            file.write(json.dumps(line | {"case": json.loads(case.to_json())}) + "\n")


if __name__ == "__main__":
    main()
