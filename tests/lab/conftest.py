"""Fixture of four lab hosts for all scenarios of a file. The hosts are repaired after each
scenario.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.job import give_disks, mend_all
from unisono.bench.lab import Lab, reason_unavailable


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    if reason := reason_unavailable():  # before the check of each test, since this is made earlier
        pytest.skip(reason)
    with Lab(hosts=4) as lab:
        give_disks(lab)
        yield lab


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    for host in range(cluster.hosts):
        cluster.kill(host)
    mend_all(cluster)
