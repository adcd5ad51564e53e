"""Times of exchanges on a given network: simulated, with all groups of an axis at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.algorithms import build
from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.step_times.exchange_times import ExchangeTimes, GroupPlace, reached_ranks
from unisono.simulator import Job, simulate

_SMALL, _LARGE = 1e3, 64e6
"""Bytes of the two messages whose times give the start-up and the rate."""


class SimulatedExchanges(ExchangeTimes):
    """Times of exchanges on `cluster.topology`.

    Devices are numbered with tensor parallelism innermost, then context, data and pipeline
    parallelism, and rank r of the network is device r. All groups of an axis exchange at the same
    time and share links max-min fairly. Only one round of a ring is simulated, in which each device
    sends to its neighbour, because all rounds are equal. The share of a link's rate and the
    start-up time of a collective are those of flat networks.
    """

    def __init__(self, cluster: Cluster, constants: CalibratedConstants) -> None:
        super().__init__(cluster, constants)
        assert cluster.topology is not None
        self._topology, self._devices = cluster.topology, cluster.devices
        self._software = constants
        self._lines: dict[tuple[str, GroupPlace | int], tuple[float, float]] = {}

    def with_constants(self, constants: CalibratedConstants) -> SimulatedExchanges:
        """Returns the exchanges of the same cluster with other constants. Both share their
        simulations, which do not depend on constants.
        """
        found = SimulatedExchanges(self._cluster, constants)
        found._lines = self._lines
        return found

    def ring(self, group: GroupPlace) -> tuple[float, float]:
        """Returns the start-up time of a ring, and its time for each byte of an all_gather."""
        found = self._lines.get(("ring", group))
        if found is None:
            pairs = [
                (members[i], members[(i + 1) % len(members)])
                for members in self._groups(group)
                for i in range(len(members))
            ]
            found = self._lines["ring", group] = self._line(pairs, "broadcast", "chain")
        latency_s, byte_s = found
        rounds = group.ranks - 1
        start_s = self.start_s(group) + rounds * latency_s
        return start_s, rounds / group.ranks * byte_s / self._software.network_share

    def _round_start_s(self, group: GroupPlace) -> float:
        """Returns 0: the simulation has the latency of each round."""
        return 0.0

    def route_s(
        self, nbytes: float, copies: int, group: GroupPlace, *, groups: int = 1, limit: int = 1
    ) -> float:
        """Returns the time in which each rank sends `nbytes` of tokens to each of `copies` random
        ranks.
        """
        return self._exchange_s(nbytes * reached_ranks(group.ranks, copies, groups, limit), group)

    def all_to_all_s(self, nbytes: float, group: GroupPlace) -> float:
        """Returns the time in which each rank sends `nbytes`, in equal parts to all other ranks."""
        # The simulated arrays also contain the part of the rank itself.
        return self._exchange_s(nbytes * group.ranks / max(group.ranks - 1, 1), group)

    def _exchange_s(self, nbytes: float, group: GroupPlace) -> float:
        """Returns the time of an all_to_all of arrays of `nbytes`."""
        if group.ranks < 2:
            return 0.0
        found = self._lines.get(("route", group))
        if found is None:
            found = self._line(list(self._groups(group)), "all_to_all", "direct")
            self._lines["route", group] = found
        latency_s, byte_s = found
        sent_s = nbytes * byte_s / self._software.exchange_share
        return self.start_s(group) + latency_s + sent_s

    def send_s(self, nbytes: float, stride: int) -> float:
        """Returns the time of a message to a device that is `stride` devices away."""
        found = self._lines.get(("send", stride))
        if found is None:
            pairs = [(i, (i + stride) % self._devices) for i in range(self._devices)]
            found = self._lines["send", stride] = self._line(pairs, "broadcast", "chain")
        latency_s, byte_s = found
        start_s = self._software.link_start_s / 2 + latency_s
        return start_s + nbytes * byte_s / self._software.network_share

    def _groups(self, group: GroupPlace) -> Iterator[tuple[int, ...]]:
        """Yields the members of every group of this size and stride."""
        span = group.ranks * group.stride
        # The group of the first and the last pipeline stage has other stages between its two
        # members.
        last = self._devices - (span - group.stride)
        for begin in range(0, last, span):
            for first in range(begin, min(begin + group.stride, last)):
                yield tuple(range(first, first + span, group.stride))

    def _line(
        self, groups: Sequence[tuple[int, ...]], op: str, algorithm: str
    ) -> tuple[float, float]:
        """Simulates one small and one large exchange, each in all groups at the same time. Returns
        the latency and the seconds per byte.
        """
        schedule = build(op, algorithm, ranks=len(groups[0]))
        times = []
        for nbytes in (_SMALL, _LARGE):
            jobs = [
                Job(name=str(number), schedule=schedule, nbytes=nbytes, ranks=members)
                for number, members in enumerate(groups)
            ]
            times.append(simulate(jobs, self._topology).time_s)
        byte_s = (times[1] - times[0]) / (_LARGE - _SMALL)
        return max(times[0] - _SMALL * byte_s, 0.0), byte_s
