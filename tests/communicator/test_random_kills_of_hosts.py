"""Recovery over several hosts while ranks are killed at random points."""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from communicator.shrinking_hosts import joined, over_hosts, says, slow
from ranks import Me
from unisono import AbortedError, Communicator, PeerLostError

# ---- kills at random points

MANY = 5


def ones(comm: Communicator) -> NDArray[np.float64]:
    """Returns an array that the ranks of one host read in place."""
    x = comm.empty(20_000, np.float64)
    x[:] = 1
    return x


def survives(me: Me) -> None:
    """Runs collectives, and shrinks when other ranks die, until no rank has died for some time."""
    comm = joined(me)
    x, shared, done = np.ones(3000), ones(comm), 0
    while done < 300:
        try:
            comm.all_reduce(x if done % 2 else shared, "max")
            done += 1
            time.sleep(0.002)
        except PeerLostError:
            comm, done = comm.shrink(timeout_s=30), 0
            shared = ones(comm)
        except AbortedError as error:
            assert "was shrunk" not in str(error), "a living rank was left out"
            raise
    assert (x == 1).all() and (shared == 1).all()
    says(me, comm, "end")


def survives_or_is_too_few(me: Me) -> None:
    """Runs `survives`. If too few ranks are left for a shrink, reports this to the test."""
    try:
        survives(me)
    except AbortedError as error:
        assert "cannot shrink" in str(error)
        me.say("end", former=None, rank=None)


def kill_at_random(seed: int) -> None:
    chance = random.Random(seed)
    layout = chance.choice([(0, 1, 2, 3, 4), (0, 0, 1, 1, 1), (0, 1, 0, 1, 2)])
    victims = chance.sample(range(MANY), chance.randrange(1, MANY))
    with over_hosts(survives_or_is_too_few, layout) as ranks:
        ranks.wait_for("ready", range(MANY))
        for victim in victims:
            time.sleep(chance.choice([0, 0.0005, 0.005, 0.02, 0.1, 0.4]) * chance.random())
            ranks.signal(victim, signal.SIGKILL)
        left = sorted(set(range(MANY)) - set(victims))
        said = ranks.wait_for("end", left)
        former, numbers = [entry["former"] for entry in said], [entry["rank"] for entry in said]
        # if at most half of the ranks are left, the order of the deaths decides whether they can
        # shrink
        if 2 * len(left) <= MANY and None in former:
            assert former == [None] * len(left), seed
        else:
            assert (former, numbers) == ([left] * len(left), list(range(len(left)))), seed


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_kills_at_random_points(seed: int) -> None:
    kill_at_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_kills_at_random_points_fifty_times(seed: int) -> None:
    kill_at_random(seed)
