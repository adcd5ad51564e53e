from __future__ import annotations

import pytest

from unisono.bench.cases import Case
from unisono.bench.results import Measurement, Row, RunReport


@pytest.fixture
def report() -> RunReport:
    """A report with known numbers. For the small and the large call, our times are 2 and 100 us,
    Gloo's times are 20 and 4000 us, and the times at the limit are 1 and 50 us.
    """
    small = Case(op="all_reduce", ranks=4, nbytes=8)
    large = Case(op="all_reduce", ranks=4, nbytes=1 << 20)
    return RunReport(
        ours="unisono",
        contestants=("unisono", "gloo", "memory"),
        rows=(
            Row(
                case=small,
                probes_s=(45e-9, 51e-9),
                measurements=(
                    Measurement(contestant="unisono", times_s=(2e-6, 1e-6, 3e-6), iterations=9),
                    Measurement(contestant="gloo", times_s=(20e-6, 20e-6)),
                    Measurement(contestant="memory", times_s=(1e-6,)),
                ),
            ),
            Row(
                case=large,
                measurements=(
                    Measurement(contestant="unisono", times_s=(100e-6,)),
                    Measurement(contestant="gloo", times_s=(4e-3,)),
                    Measurement(contestant="memory", times_s=(50e-6,)),
                ),
            ),
        ),
        skipped={"mpich": "Traceback\nrequires: pip install 'unisono[peers]'"},
        machine={
            "cpu": "Some CPU",
            "cores": 2,
            "kernel": "6",
            "python": "3",
            "packages": {},
            "busy_cores": 0.1,
        },
        command=("unisono", "bench", "all_reduce"),
    )
