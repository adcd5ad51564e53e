from __future__ import annotations

from typing import Any

import pytest

from unisono.bench import selfcheck
from unisono.bench.cases import Case
from unisono.bench.selfcheck import CheckResult, Checks, check_cases, run_checks


@pytest.mark.slow  # test_documentation.py also runs `unisono check`
def test_this_machine() -> None:
    checks = run_checks(2)
    assert checks.error is None
    assert checks.passed
    assert {verdict.op for verdict in checks.verdicts} == set(selfcheck.OPERATIONS)
    assert {"cpu", "kernel", "memfd_create", "process_vm_readv"} <= {f.name for f in checks.facts}
    assert checks.to_dict()["passed"] is True


class Idle:
    """A simulated rank 0 whose calls do nothing."""

    rank = 0


def test_an_operation_that_does_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "bind", lambda comm, case, x, out: lambda: None)
    verdict = selfcheck._check_operation(Idle(), "all_gather", 2)  # type: ignore[arg-type]
    assert "float32 sum 1000 B root 0" in " ".join(verdict.failures)
    assert not Checks(ranks=2, facts=(), verdicts=(verdict,)).passed


def test_failures_of_any_rank_count() -> None:
    good = CheckResult(op="reduce", cases=3, dtypes=("int8",))
    bad = CheckResult(op="reduce", cases=3, dtypes=("int8",), failures=("int8: 1 wrong element",))
    assert selfcheck._merge((good, bad)).failures == bad.failures


def test_ranks_that_do_not_start_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(selfcheck.unisono, "run", refuse)
    checks = run_checks(2)
    assert not checks.passed
    assert checks.error == "no memory"


def test_every_type_and_reduction_is_tried() -> None:
    cases = list(check_cases("reduce", 4))
    assert {case.root for case in cases} == {0, 3}
    assert Case(op="reduce", ranks=4, nbytes=1000, dtype="bool", redop="bor", root=3) in cases
    assert len({case.dtype for case in cases}) == 21
    assert {(c.dtype, c.redop) for c in cases} >= {("int64", "lxor"), ("float64_int64", "maxloc")}
