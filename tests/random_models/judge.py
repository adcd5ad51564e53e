"""Runs a case, and judges its outcome against one process."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from random_models.block import EXACT
from random_models.blocks import BLOCKS
from random_models.case import Case
from random_models.habits import HABITS
from random_models.optimizers import MAGNIFYING, PROPORTIONAL
from random_models.outcome import Outcome
from random_models.sentences import fault_of_error
from worlds.forked import start

_HERE = Path(__file__).parent
_HANG_S = 20.0
"""Seconds after which a case hangs; a case takes about one second."""
_AFTER_ERROR_S = 4.0
"""Seconds after the first rank's error in which the other ranks must end, too."""
_MORE = 3.0
"""Factor of both limits when a case that seems to hang runs once more."""
_BFLOAT16 = 0.05
"""Tolerance under autocast: the rounding of one process's sums differs from that of parts."""
_DISTURBED = 6
_AS_NEAR = 2.0
"""Under autocast, how many times the effect of disturbed weights rounding may have."""
_NUMBERS = ("wrong loss", "wrong norm")

GOOD = ("equal", "refused", "ran", "invalid")
"""Kinds of verdicts that are no faults. "ran": no result is expected, since masks are random.
"invalid": one process fails, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judgement on a case."""

    kind: str
    detail: str

    @property
    def is_fault(self) -> bool:
        return self.kind not in GOOD

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def judge(case: Case) -> Verdict:
    """Runs a case on its ranks and in one process, and compares them."""
    found = _judge_once(case, 1.0)
    if found.kind in _NUMBERS and case.autocast and case.optimizer not in PROPORTIONAL:
        proportional = _judge_once(replace(case, optimizer="sgd"), 1.0)
        if not proportional.is_fault:
            return Verdict(kind="ran", detail=f"the optimizer magnifies rounding: {found}")
    return _judge_once(case, _MORE) if found.kind == "hang" else found


def _judge_once(case: Case, patience: float) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="random-models-") as name:
        folder, text = Path(name), case.to_json()
        alone = start(
            str(_HERE / "training_alone.py"), "main", text, folder, log=folder / "alone.log"
        )
        ranks = [
            start(
                str(_HERE / "training_rank.py"), "main", rank, text, folder,
                log=folder / f"{rank}.log",
            )
            for rank in range(case.ranks)
        ]  # fmt: skip
        paths = [folder / f"{rank}.outcome" for rank in range(case.ranks)]
        try:
            _wait([alone, *ranks], [folder / "alone.outcome", *paths], patience)
        finally:
            for process in [alone, *ranks]:
                process.kill()
                process.join()
        dead = [r for r, p in enumerate(paths) if not p.exists() and ranks[r].exitcode != -9]
        if dead:
            return Verdict(kind="death", detail=(folder / f"{dead[0]}.log").read_text()[-600:])
        expected = Outcome.read(folder / "alone.outcome")
        outcomes = [Outcome.read(path) if path.exists() else None for path in paths]
        verdict = compare(case, expected, outcomes)
        if case.autocast and verdict.kind in _NUMBERS and outcomes[0] is not None:
            disturbed = _disturbed(text, folder)
            if _is_rounding(outcomes[0], expected, disturbed):
                return Verdict(kind="ran", detail=f"the model magnifies rounding: {verdict}")
        return verdict


def _disturbed(text: str, folder: Path) -> list[Outcome]:
    """Runs a case in one process with weights that are disturbed as bfloat16 rounds them."""
    found = []
    for number in range(1, _DISTURBED + 1):
        own = folder / f"disturbed{number}"
        own.mkdir()
        program = str(_HERE / "training_alone.py")
        process = start(program, "main", text, own, number, log=own / "log")
        process.join()
        found.append(Outcome.read(own / "alone.outcome"))
    return found


def _is_rounding(found: Outcome, alone: Outcome, disturbed: Sequence[Outcome]) -> bool:
    """Returns True if ranks are as near to one process as small changes of the weights are."""
    every = [[*each.losses, *each.norms] for each in (found, alone, *disturbed)]
    return all(
        not math.isfinite(wanted)
        or abs(own - wanted)
        <= _AS_NEAR * max(abs(each - wanted) for each in others) + _BFLOAT16 * abs(wanted)
        for own, wanted, *others in zip(*every, strict=True)
    )


def _wait(processes: Sequence[BaseProcess], paths: Sequence[Path], patience: float) -> None:
    """Waits until each process has written its outcome or has ended."""
    deadline, has_failed = time.monotonic() + _HANG_S * patience, False
    while time.monotonic() < deadline:
        pairs = zip(processes, paths, strict=True)
        if all(path.exists() or not process.is_alive() for process, path in pairs):
            return
        if not has_failed and any(path.exists() for path in paths[1:]):
            has_failed = True
            deadline = min(deadline, time.monotonic() + _AFTER_ERROR_S * patience)
        time.sleep(0.01)


def compare(case: Case, expected: Outcome, outcomes: Sequence[Outcome | None]) -> Verdict:
    """Returns the verdict on the outcomes of all ranks; None: the rank has not finished."""
    texts = [_text(each) for each in outcomes]
    summary = " | ".join(dict.fromkeys(texts))
    if any(each is None for each in outcomes):
        return Verdict(kind="hang", detail=summary)
    done = [each for each in outcomes if each is not None]
    failed = [each for each in done if each.error is not None]
    if expected.error is not None:
        return Verdict(kind="invalid", detail=f"one process: {expected.error[:200]} / {summary}")
    if failed:
        for each in failed:
            fault = fault_of_error(each)
            if fault is not None:
                return Verdict(kind=fault, detail=summary)
        kind = "refused" if len(failed) == len(done) else "ranks disagree"
        return Verdict(kind=kind, detail=summary)
    if HABITS[case.habit].is_refused:
        return Verdict(kind="accepted", detail=f"{case.habit}: {done[0].losses}")
    return _compare_numbers(case, expected, done)


def _text(outcome: Outcome | None) -> str:
    if outcome is None:
        return "does not end"
    if outcome.error is None:
        return "no error"
    return f"{outcome.phase}: {outcome.kinds[0]}: {outcome.error}"


def _compare_numbers(case: Case, expected: Outcome, outcomes: Sequence[Outcome]) -> Verdict:
    tolerance = max([EXACT, *(BLOCKS[name].tolerance for name in case.blocks)])
    tolerance = max(tolerance, _BFLOAT16 * case.autocast)
    first = outcomes[0]
    for each in outcomes:
        if not (_near(each.losses, first.losses, 0) and _near(each.norms, first.norms, 0)):
            return Verdict(kind="ranks disagree", detail=f"{first.losses} | {each.losses}")
    if case.habit != "eval" and any(BLOCKS[name].is_random for name in case.blocks):
        return Verdict(kind="ran", detail="random masks")
    pairs = ((first.losses, expected.losses), (first.norms, expected.norms))
    for kind, (found, wanted) in zip(_NUMBERS, pairs, strict=True):
        if not _near(found, wanted, tolerance):
            return Verdict(kind=kind, detail=f"{_short(found)} for {_short(wanted)}")
    if case.optimizer in MAGNIFYING or (case.autocast and case.optimizer not in PROPORTIONAL):
        tolerance = 1.0
    return _compare_weights(expected, outcomes, tolerance)


def _compare_weights(expected: Outcome, outcomes: Sequence[Outcome], tolerance: float) -> Verdict:
    seen = set()
    for rank, outcome in enumerate(outcomes):
        for name, (start_of, values) in outcome.weights.items():
            seen.add(name)
            if name not in expected.weights:
                return Verdict(kind="wrong names", detail=f"{name} is no name of the model")
            whole = expected.weights[name][1]
            place = tuple(slice(a, a + n) for a, n in zip(start_of, values.shape, strict=True))
            wanted = whole[place]
            same = wanted.shape == values.shape and torch.allclose(
                values.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance, equal_nan=True
            )
            if not same:
                return Verdict(
                    kind="wrong weights", detail=f"rank {rank}, {name}: {values} for {wanted}"[:400]
                )
    missing = expected.weights.keys() - seen
    return Verdict(
        kind="equal", detail=_short(expected.losses) + f" missing {sorted(missing)}" * bool(missing)
    )


def _near(found: Sequence[float], wanted: Sequence[float], tolerance: float) -> bool:
    return len(found) == len(wanted) and all(
        a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(abs(a), abs(b))
        for a, b in zip(found, wanted, strict=True)
    )


def _short(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{each:.6g}" for each in values) + "]"
