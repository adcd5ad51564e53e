"""The benchmark and the check on a device. Here the device is host memory, with copies."""

from __future__ import annotations

import pytest

from unisono.bench.cases import Case
from unisono.bench.contestants import Contestant, plan_launch, reason_missing
from unisono.bench.runner import Pace, run_benchmark
from unisono.bench.selfcheck import require_device, run_checks
from unisono.errors import UnsupportedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
QUICK = Pace(rounds=2, round_s=0.002)


def test_contestants_on_a_device_are_measured_and_verified():
    cases = [Case(op=op, ranks=2, nbytes=4096) for op in ("all_reduce", "all_gather", "ping_pong")]
    names = ["unisono-torch", "gloo", "memory"]
    report = run_benchmark(cases, names, ours="unisono-torch", pace=QUICK, device="cpu")
    assert not report.skipped and not report.failed
    assert report.settings["device"] == "cpu"
    for row in report.rows[:2]:
        assert all(each.times_s and not each.wrong for each in row.measurements)
    assert "limit of ping_pong" in str(report.rows[2].measurements[2].error)


def test_check_on_a_device():
    checks = run_checks(2, "cpu", ["all_reduce", "scatter", "all_gather_v", "stream", "scan"])
    assert checks.passed, checks
    cases = {verdict.op: verdict.cases for verdict in checks.verdicts}
    assert cases["all_reduce"] > 100 and cases["scatter"] > 50 and cases["stream"] > 20
    assert cases["scan"] == 0  # torch.distributed has none


@pytest.mark.parametrize("name", ["unisono", "openmpi", "unisono:ring", "network"])
def test_contestants_without_tensors_on_devices_are_refused(name):
    with pytest.raises(ValueError, match="no tensors on cuda; those that have are unisono-torch"):
        Contestant(name=name, device="cuda")


def test_nccl_needs_a_device(tmp_path):
    with pytest.raises(ValueError, match="add --device cuda"):
        Contestant(name="nccl")
    nccl = Contestant(name="nccl", device="cuda")
    assert reason_missing(nccl) is None
    (first, _) = plan_launch(nccl, ranks=2, folder=tmp_path, bind=False)
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in first
    assert first[first.index("--device") + 1] == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so():
    require_device("")
    with pytest.raises(UnsupportedError, match=r"--device cuda: torch .* (has no CUDA|no GPU)"):
        require_device("cuda")
