"""Times of exchanges between experts: a token is sent once to each rank."""

from __future__ import annotations

import numpy as np
import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.step_times.exchange_times import ExchangeTimes, reached_ranks

CONSTANTS = default_constants()


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (8, 8), (64, 4)])
def test_a_token_is_sent_once_to_each_rank(ranks: int, copies: int) -> None:
    """Counts the different ranks of tokens that choose random experts, and the bytes that leave a
    rank. The time of the exchange is that of these bytes.
    """
    random = np.random.default_rng(0)
    chosen = random.integers(ranks, size=(20_000, copies))
    counts = [len(set(token)) for token in chosen.tolist()]
    assert reached_ranks(ranks, copies) == pytest.approx(np.mean(counts), rel=0.02)
    others = [len(set(token) - {0}) for token in chosen.tolist()]  # rank 0 sends to these
    cluster = planner.Cluster(device="gb200", devices=ranks, per_host=ranks)
    exchanges = ExchangeTimes(cluster, CONSTANTS)
    group, nbytes = exchanges.place(ranks, 1), 1e8
    seconds = exchanges.route_s(nbytes, copies, group) - exchanges.start_s(group)
    rate = cluster.domain_Bps * CONSTANTS.link_share
    assert seconds == pytest.approx(nbytes * np.mean(others) / rate, rel=0.02)
