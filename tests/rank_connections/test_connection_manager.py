"""Ranks join, connect, exchange control messages, and leave, over real sockets."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations

import pytest

from connection_managers import (
    SECRET,
    WORLD,
    Recorder,
    exchange,
    make_manager,
    peer_infos_of,
    wait_until,
    world,
)
from group_resources import descriptors
from time_limits import cpu_since, cpu_times, threads
from unisono.errors import AbortedError, RendezvousError
from unisono.rank_connections.connection_manager import ConnectionManager
from unisono.rank_connections.group_endpoint import Fault
from unisono.transport.handshake import Handshake

GROUP = b"a group"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("streams", [1, 3])
def test_all_ranks_connect_to_all(address: str, streams: int) -> None:
    with world(4, address, streams=streams) as ranks:
        members = [2, 0, 3, 1]
        ends = [ranks[rank].enter(GROUP, members) for rank in members]
        for rank in members:
            ranks[rank].manager.reach(GROUP, range(4), 0)
            ranks[rank].manager.reach(GROUP, range(4), 0)
        wait_until(lambda: all(len(end.sockets) == 3 * streams for end in ends))
        assert all(end.streams == {streams} for end in ends)
        for me, peer in combinations(range(4), 2):
            exchange(ends[me], ends[peer], me, peer)
        assert all(end.failure() is None for end in ends)


def test_each_kind_has_its_own_connections() -> None:
    with world(2) as ranks:
        ends = [member.enter(GROUP, [0, 1]) for member in ranks]
        for kind in (0, 1):
            for member in ranks:
                member.manager.reach(GROUP, [0, 1], kind)
        wait_until(lambda: all(len(end.sockets) == 2 for end in ends))
        for kind in (0, 1):
            exchange(ends[0], ends[1], 0, 1, kind)


def test_streams_alternate_between_rails() -> None:
    rails = ["127.0.0.1", "127.0.0.2"]
    with world(2, rails, streams=2) as ranks:
        ends = [member.enter(GROUP, [0, 1]) for member in ranks]
        for member in ranks:
            member.manager.reach(GROUP, [0, 1], 0)
        wait_until(lambda: all(len(end.sockets) == 4 for end in ends))
        exchange(ends[0], ends[1], 0, 1)
        for (_, _, stream), sock in ends[1].sockets.items():
            ends_of_it = {sock.getsockname()[0], sock.getpeername()[0]}
            assert ends_of_it == {rails[stream % 2]}


def test_connections_may_arrive_before_the_group_is_entered() -> None:
    with world(2) as ranks:
        late = ranks[1].enter(GROUP, [0, 1])
        ranks[1].manager.reach(GROUP, [0], 0)
        wait_until(lambda: late.sockets)
        end = ranks[0].enter(GROUP, [0, 1])
        wait_until(lambda: end.sockets)
        exchange(end, late, 0, 1)


def test_early_messages_are_handled_when_the_group_is_entered() -> None:
    with world(3) as ranks:
        first = ranks[1].enter(GROUP, [0, 1, 2])
        first.fail_here(3, "rank 1 called all_reduce")
        ranks[2].enter(GROUP, [0, 1, 2])
        ranks[2].manager.leave(GROUP)
        time.sleep(0.05)
        end = ranks[0].enter(GROUP, [0, 1, 2])
        wait_until(lambda: end.failure() and end.left)
        assert end.failure() == (3, "rank 1 called all_reduce")
        assert end.left == {2}


def test_connections_of_a_rank_arrive_before_its_departure() -> None:
    had: list[int] = []

    class Witness(Recorder):
        def peer_left(self, peer: int) -> None:
            had.append(len(self.sockets))
            super().peer_left(peer)

    with world(2, streams=2) as ranks:
        late = ranks[1].enter(GROUP, [0, 1])
        ranks[1].manager.reach(GROUP, [0], 0)
        wait_until(lambda: len(late.sockets) == 2)
        ranks[1].manager.leave(GROUP)
        time.sleep(0.05)
        end = ranks[0].enter(GROUP, [0, 1], Witness())
        wait_until(lambda: end.left)
        assert had == [2]


def test_a_failure_is_sent_to_the_members_only() -> None:
    with world(4) as ranks:
        one = [ranks[rank].enter(b"one", [1, 3]) for rank in (1, 3)]
        other = [ranks[rank].enter(b"other", [0, 1, 2, 3]) for rank in range(4)]
        one[0].fail_here(Fault.SYSTEM, "no memory: ä")
        wait_until(one[1].failure)
        assert one[1].failure() == (Fault.SYSTEM, "no memory: ä")
        time.sleep(0.05)
        assert all(end.failure() is None for end in other)


def test_a_rank_that_leaves_at_once_reports_its_failure() -> None:
    with world(2) as ranks:
        ends = [member.enter(GROUP, range(2)) for member in ranks]
        # the event of this failure arrives after the rank has left the group
        ends[1].fail(Fault.SYSTEM, "no memory")
        ranks[1].manager.leave(GROUP)
        wait_until(ends[0].failure)
        assert ends[0].failure() == (Fault.SYSTEM, "no memory")


def test_a_departure_is_sent_to_all() -> None:
    with world(3) as ranks:
        ends = [member.enter(GROUP, [2, 1, 0]) for member in ranks]
        ranks[2].manager.leave(GROUP)
        wait_until(lambda: ends[0].left == {0} and ends[1].left == {0})
        assert not ends[2].left
        ranks[0].manager.close()  # rank 0 also leaves, and does not count as lost
        wait_until(lambda: ends[1].left == {0, 2})
        time.sleep(0.05)
        assert [end.failure() for end in ends] == [None] * 3


def test_idle_ranks_use_no_cpu() -> None:
    before = threads()
    with world(8) as ranks:
        for member in ranks:
            member.enter(GROUP, range(8))
        own = threads() - before
        # on a busy machine, the threads may still enter the group in the first seconds
        assert any(_cpu_of_a_second(own) < 0.02 for _ in range(10))


def _cpu_of_a_second(own: set[str]) -> float:
    used = cpu_times(own)
    time.sleep(1)
    return cpu_since(used)


def test_sixty_four_ranks_join_at_once() -> None:
    with world(64) as ranks:
        ends = [member.enter(GROUP, range(64)) for member in ranks]
        ends[63].fail_here(1, "all hear of it")
        wait_until(lambda: all(end.failure() for end in ends))


# ---- addresses and ports


def test_a_rank_that_ends_during_its_proof_is_missing_in_a_control_group() -> None:
    """Ends rank 0, the server, while it proves to rank 1 that it knows the secret. Rank 0 counts as
    missing, since it knew the secret when it joined. So the caller may form a group without rank 0.
    """
    with world(2) as ranks:
        address = ranks[0].manager.bound[0]
        ranks[0].manager.close()
        with socket.create_server(address) as listener:

            def end_during_the_proof() -> None:
                sock, _ = listener.accept()
                with sock:
                    greeting = Handshake(b"any", dialing=False, purpose=b"any")
                    sock.sendall(
                        greeting.take(sock.recv(greeting.wanted_bytes, socket.MSG_WAITALL))
                    )
                    sock.recv(greeting.wanted_bytes, socket.MSG_WAITALL)

            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(end_during_the_proof)
                with pytest.raises(RendezvousError, match="closed the connection after our proof"):
                    ranks[1].manager.form_control_group(
                        b"a control group", [0, 1], b"", 10, lambda: None
                    )
                ended.result()


def test_a_free_port_of_the_range_is_used() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        if port > 65000:
            pytest.skip("the kernel chose a port at the very end")
        terms = {"addresses": ["127.0.0.1"], "streams": 1, "peer_timeout_s": 2.5}
        found = ConnectionManager(ports=range(port, port + 20), **terms)
        assert found.bound[0][1] in range(port + 1, port + 20)
        found.close()
        with pytest.raises(
            RendezvousError, match=f"all ports {port}-{port} of 127.0.0.1 are taken"
        ):
            ConnectionManager(ports=range(port, port + 1), **terms)


def test_it_listens_on_the_chosen_address_only() -> None:
    manager = make_manager("127.0.0.2")
    (address, port) = manager.bound[0]
    assert address == "127.0.0.2"
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(("127.0.0.1", port))
    manager.close()


def test_an_address_of_another_host_is_refused() -> None:
    for address in ("192.0.2.1", "a name"):
        with pytest.raises(RendezvousError, match=address):
            make_manager(address)


# ---- lifetime and resources


def test_the_thread_lives_from_join_to_close() -> None:
    before, opened = set(threading.enumerate()), descriptors()
    manager = make_manager()
    assert not set(threading.enumerate()) - before
    with pytest.raises(RendezvousError, match="not joined"):
        manager.leave(GROUP)
    manager.join(
        world=WORLD, secret=SECRET, rank=0, peer_infos=peer_infos_of([manager]), timeout_s=5
    )
    assert len(set(threading.enumerate()) - before) == 1
    manager.close()
    manager.close()
    assert not set(threading.enumerate()) - before
    assert not descriptors() - opened
    with pytest.raises(AbortedError):
        manager.leave(GROUP)


def test_close_closes_all_descriptors() -> None:
    opened = descriptors()
    with world(3) as ranks:
        for member in ranks:
            member.enter(GROUP, range(3))
            member.manager.reach(GROUP, range(3), 0)
        ranks[2].enter(b"never entered by others", range(3))
        ranks[2].manager.reach(b"never entered by others", range(3), 1)
        time.sleep(0.1)
    wait_until(lambda: not descriptors() - opened)


# the warning says that the process is multi-threaded, as this test requires
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_does_not_disturb_its_parent() -> None:
    before = _open_files()
    with world(2) as ranks:
        ends = [member.enter(GROUP, range(2)) for member in ranks]
        child = os.fork()
        if child == 0:
            ok = True
            for member in ranks:
                try:
                    member.manager.leave(GROUP)
                    ok = False
                except AbortedError:
                    member.manager.close()
            targets = _open_files() - before
            ok = ok and not any("eventpoll" in target for target in targets)
            ok = ok and not any(target.startswith("socket:") for target in targets)
            os._exit(0 if ok else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        for member in ranks:
            member.manager.reach(GROUP, range(2), 0)
        wait_until(lambda: all(end.sockets for end in ends))
        exchange(ends[0], ends[1], 0, 1)


# the warning says that the process is multi-threaded, as this test requires
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_closes_the_connections_of_groups() -> None:
    before = _open_files()
    with world(2) as ranks:
        ends = [member.enter(GROUP, range(2)) for member in ranks]
        for member in ranks:
            member.manager.reach(GROUP, range(2), 0)
        wait_until(lambda: all(end.sockets for end in ends))
        child = os.fork()
        if child == 0:
            targets = _open_files() - before
            os._exit(any(target.startswith("socket:") for target in targets))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        exchange(ends[0], ends[1], 0, 1)


def _open_files() -> set[str]:
    """Returns the targets of this process's file descriptors."""
    found = set()
    for fd in range(3, 512):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_signals_are_left_to_the_main_thread() -> None:
    manager = make_manager()
    manager.join(
        world=WORLD, secret=SECRET, rank=0, peer_infos=peer_infos_of([manager]), timeout_s=5
    )
    masks = []
    manager._loop.run(lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])), 1)
    manager.close()
    assert signal.SIGINT in masks[0] and signal.SIGTERM in masks[0]
