"""Ranks join, connect, hear of each other, and leave; all over real sockets."""

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
    contacts_of,
    exchange,
    make_porter,
    wait_until,
    world,
)
from ranks import no_descriptors
from unisono.control.connection_manager import ConnectionManager
from unisono.control.group_endpoint import ANXIOUS_EVENT, Fault
from unisono.control.messages import CALLED_BYTES, ControlMessage, MessageKind
from unisono.errors import AbortedError, AuthenticationError, RendezvousError
from unisono.transport.handshake import Handshake
from unisono.transport.introduction import tag_of

GROUP = b"a group"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("streams", [1, 3])
def test_all_reach_all(address: str, streams: int) -> None:
    with world(4, address, streams=streams) as places:
        members = [2, 0, 3, 1]
        ends = [places[rank].enter(GROUP, members) for rank in members]
        for rank in members:
            places[rank].porter.reach(GROUP, range(4), 0)
            places[rank].porter.reach(GROUP, range(4), 0)
        wait_until(lambda: all(len(end.sockets) == 3 * streams for end in ends))
        assert all(end.streams == {streams} for end in ends)
        for me, peer in combinations(range(4), 2):
            exchange(ends[me], ends[peer], me, peer)
        assert all(end.failure() is None for end in ends)


def test_each_kind_has_its_own_connections() -> None:
    with world(2) as places:
        ends = [place.enter(GROUP, [0, 1]) for place in places]
        for kind in (0, 1):
            for place in places:
                place.porter.reach(GROUP, [0, 1], kind)
        wait_until(lambda: all(len(end.sockets) == 2 for end in ends))
        for kind in (0, 1):
            exchange(ends[0], ends[1], 0, 1, kind)


def test_rails_take_turns() -> None:
    rails = ["127.0.0.1", "127.0.0.2"]
    with world(2, rails, streams=2) as places:
        ends = [place.enter(GROUP, [0, 1]) for place in places]
        for place in places:
            place.porter.reach(GROUP, [0, 1], 0)
        wait_until(lambda: all(len(end.sockets) == 4 for end in ends))
        exchange(ends[0], ends[1], 0, 1)
        for (_, _, stream), sock in ends[1].sockets.items():
            ends_of_it = {sock.getsockname()[0], sock.getpeername()[0]}
            assert ends_of_it == {rails[stream % 2]}


def test_connections_come_before_the_group_is_entered() -> None:
    with world(2) as places:
        late = places[1].enter(GROUP, [0, 1])
        places[1].porter.reach(GROUP, [0], 0)
        wait_until(lambda: late.sockets)
        end = places[0].enter(GROUP, [0, 1])
        wait_until(lambda: end.sockets)
        exchange(end, late, 0, 1)


def test_what_is_told_before_the_group_is_entered() -> None:
    with world(3) as places:
        first = places[1].enter(GROUP, [0, 1, 2])
        first.fail_here(3, "rank 1 called all_reduce")
        places[2].enter(GROUP, [0, 1, 2])
        places[2].porter.leave(GROUP)
        time.sleep(0.05)
        end = places[0].enter(GROUP, [0, 1, 2])
        wait_until(lambda: end.failure() and end.left)
        assert end.failure() == (3, "rank 1 called all_reduce")
        assert end.left == {2}


def test_connections_of_who_has_left_come_before_that_is_told() -> None:
    had: list[int] = []

    class Witness(Recorder):
        def peer_left(self, peer: int) -> None:
            had.append(len(self.sockets))
            super().peer_left(peer)

    with world(2, streams=2) as places:
        late = places[1].enter(GROUP, [0, 1])
        places[1].porter.reach(GROUP, [0], 0)
        wait_until(lambda: len(late.sockets) == 2)
        places[1].porter.leave(GROUP)
        time.sleep(0.05)
        end = places[0].enter(GROUP, [0, 1], Witness())
        wait_until(lambda: end.left)
        assert had == [2]


def test_a_failure_is_told_to_the_members_only() -> None:
    with world(4) as places:
        one = [places[rank].enter(b"one", [1, 3]) for rank in (1, 3)]
        other = [places[rank].enter(b"other", [0, 1, 2, 3]) for rank in range(4)]
        one[0].fail_here(Fault.SYSTEM, "no memory: ä")
        wait_until(one[1].failure)
        assert one[1].failure() == (Fault.SYSTEM, "no memory: ä")
        time.sleep(0.05)
        assert all(end.failure() is None for end in other)


def test_a_failure_is_told_by_who_leaves_at_once() -> None:
    with world(2) as places:
        ends = [place.enter(GROUP, range(2)) for place in places]
        ends[1].fail(Fault.SYSTEM, "no memory")  # its event comes when nobody hears it any more
        places[1].porter.leave(GROUP)
        wait_until(ends[0].failure)
        assert ends[0].failure() == (Fault.SYSTEM, "no memory")


def test_leaving_is_told() -> None:
    with world(3) as places:
        ends = [place.enter(GROUP, [2, 1, 0]) for place in places]
        places[2].porter.leave(GROUP)
        wait_until(lambda: ends[0].left == {0} and ends[1].left == {0})
        assert not ends[2].left
        places[0].porter.close()  # rank 0 says goodbye too, and nobody takes it for lost
        wait_until(lambda: ends[1].left == {0, 2})
        time.sleep(0.05)
        assert [end.failure() for end in ends] == [None] * 3


@pytest.mark.parametrize("end", ["leave", "close"])
def test_who_is_anxious_hears_who_has_left_without_the_middle(end: str) -> None:
    with world(3) as places:
        asking, _ = (places[rank].enter(GROUP, [1, 2]) for rank in (1, 2))
        places[0].porter.close()
        if end == "leave":
            places[2].porter.leave(GROUP)
        else:
            places[2].porter.close()
        time.sleep(0.05)
        asking.raise_events(ANXIOUS_EVENT)
        wait_until(lambda: asking.left == {1})
        assert asking.failure() is None


def test_who_has_asked_often_without_the_middle_still_hears() -> None:
    look = ControlMessage(
        say=MessageKind.LOOK, origin=1, tag=tag_of(GROUP), to=(2,), body=bytes(CALLED_BYTES)
    )
    with world(3) as places:
        asking, asked = (places[rank].enter(GROUP, [1, 2]) for rank in (1, 2))
        places[0].porter.close()
        tell = places[1].porter._joined.post.tell
        for _ in range(30):  # as in some minutes of waiting
            answers = asked.lookers
            places[1].porter._loop.run(lambda: [tell(look) for _ in range(10)], 5)
            wait_until(lambda answers=answers: asked.lookers > answers)
        asked.last_call = b"a call"
        asking.raise_events(ANXIOUS_EVENT)
        wait_until(lambda: asking.calls == {1: b"a call"})


def test_who_has_asked_often_for_a_rank_that_is_late_still_hears() -> None:
    look = ControlMessage(
        say=MessageKind.LOOK, origin=1, tag=tag_of(GROUP), to=(2,), body=bytes(CALLED_BYTES)
    )
    with world(3) as places:
        asking = places[1].enter(GROUP, [1, 2])
        places[0].porter.close()
        tell, loops = places[1].porter._joined.post.tell, [p.porter._loop for p in places[1:]]
        for _ in range(150):  # as in a minute of waiting
            loops[0].run(lambda: tell(look), 5)
            for loop in loops:
                loop.run(lambda: None, 5)
        places[2].enter(GROUP, [1, 2])
        places[2].porter.leave(GROUP)
        asking.raise_events(ANXIOUS_EVENT)
        wait_until(lambda: asking.left == {1})


def test_who_is_anxious_hears_who_has_left_without_the_middle_of_its_circle() -> None:
    """The middle of the world is there, but the group hears nothing of it."""
    with world(4) as places:
        with ThreadPoolExecutor(3) as pool:
            for place in places[1:]:
                pool.submit(place.porter.rally, b"a circle", [1, 2, 3], b"", 10, lambda: None)
        asking, _ = (places[rank].enter(GROUP, [2, 3], circle=b"a circle") for rank in (2, 3))
        places[1].porter.close()
        places[3].porter.leave(GROUP)
        asking.raise_events(ANXIOUS_EVENT)
        wait_until(lambda: asking.left == {1})
        assert asking.failure() is None


def test_a_rank_that_has_no_descriptor_to_ask_with_asks_later() -> None:
    with world(3) as places:
        asking, asked = (places[rank].enter(GROUP, [1, 2]) for rank in (1, 2))
        asked.last_call = b"a call"
        places[0].porter.close()
        with no_descriptors():
            asking.raise_events(ANXIOUS_EVENT)
            wait_until(lambda: asking.lookers)
            for _ in range(2):  # the dial, and what comes of it
                places[1].porter._loop.run(lambda: None, 5)
        wait_until(lambda: asking.calls == {1: b"a call"})
        assert not asking.left and asking.failure() is None


def test_who_is_anxious_hears_what_all_called() -> None:
    with world(4) as places:
        ends = [place.enter(GROUP, range(4)) for place in places]
        for rank, end in enumerate(ends):
            end.last_call = f"call {rank}".encode()
        for asker in (0, 2):
            # As the native core does: again while it waits, since a peer may enter only then.
            def asked(asker: int = asker) -> bool:
                ends[asker].raise_events(ANXIOUS_EVENT)
                return len(ends[asker].calls) == 3

            wait_until(asked)
            assert ends[asker].calls == {r: f"call {r}".encode() for r in range(4) if r != asker}
        ends[1].last_call = b"another"
        ends[2].raise_events(ANXIOUS_EVENT)
        wait_until(lambda: ends[2].calls[1] == b"another")


def test_anxious_ranks_ask_four_times_a_second_at_most() -> None:
    with world(3) as places:
        ends = [place.enter(GROUP, range(3)) for place in places]
        begun = time.monotonic()
        while time.monotonic() - begun < 1.2:
            ends[1].raise_events(ANXIOUS_EVENT)
            ends[2].raise_events(ANXIOUS_EVENT)
            time.sleep(0.005)
        assert 2 <= ends[0].lookers <= 1 + (time.monotonic() - begun) / 0.25


def test_nothing_runs_when_nothing_happens() -> None:
    with world(8) as places:
        for place in places:
            place.enter(GROUP, range(8))
        time.sleep(0.1)
        begun = time.process_time()
        time.sleep(1)
        assert time.process_time() - begun < 0.02


def test_sixty_four_ranks_join_at_once() -> None:
    begun = time.monotonic()
    with world(64) as places:
        assert time.monotonic() - begun < 5
        ends = [place.enter(GROUP, range(64)) for place in places]
        ends[63].fail_here(1, "all hear of it")
        wait_until(lambda: all(end.failure() for end in ends))


# ---- what goes wrong


def test_a_wrong_secret_is_named_at_once() -> None:
    porters, secrets = [make_porter(), make_porter()], [SECRET, b"another"]
    begun = time.monotonic()

    def join(rank: int) -> None:
        porters[rank].join(
            world=WORLD, secret=secrets[rank], rank=rank, contacts=contacts_of(porters), timeout_s=1
        )

    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(join, rank) for rank in range(2)]
        with pytest.raises(AuthenticationError, match="same job secret"):
            joining[1].result()
        assert time.monotonic() - begun < 0.9
        with pytest.raises(
            RendezvousError, match=r"s \(timeout\) ranks \[1\] of 2 had not connected"
        ):
            joining[0].result()


def test_another_world_is_another_job() -> None:
    porters = [make_porter(), make_porter()]

    def join(rank: int) -> None:
        contacts = contacts_of(porters)
        porters[rank].join(
            world=b"%d" % rank, secret=SECRET, rank=rank, contacts=contacts, timeout_s=1
        )

    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(join, rank) for rank in range(2)]
        with pytest.raises(AuthenticationError):
            joining[1].result()
        with pytest.raises(RendezvousError):
            joining[0].result()


def test_rank_0_is_not_there() -> None:
    porters = [make_porter(), make_porter()]
    contacts = contacts_of(porters)
    porters[0].close()
    with pytest.raises(
        RendezvousError, match=r"rank 1 cannot .* rank 0 at 127.0.0.1:\d+: .*refused"
    ):
        porters[1].join(world=WORLD, secret=SECRET, rank=1, contacts=contacts, timeout_s=5)


def test_rank_0_does_not_answer() -> None:
    porters = [make_porter(), make_porter()]
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match="rank 0"):
        porters[1].join(
            world=WORLD, secret=SECRET, rank=1, contacts=contacts_of(porters), timeout_s=0.5
        )
    assert time.monotonic() - begun < 1.5
    porters[0].close()


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    with world(3) as places:
        ends = [place.enter(GROUP, range(3)) for place in places]
        for listener in places[1].porter._listeners:
            places[1].porter._loop.run(lambda one=listener: (
                places[1].porter._loop.unwatch(one), one.close()), 1)  # fmt: skip
        places[2].porter.reach(GROUP, [1], 0)
        wait_until(lambda: all(end.failure() for end in ends))
        for end in ends:
            assert end.failure() is not None
            fault, text = end.failure() or (0, "")
            assert fault == Fault.PEER_LOST
            assert "rank 1 at 127.0.0.1:" in text and "refused" in text


def test_a_lost_rank_is_told_to_groups_entered_later() -> None:
    with world(3) as places:
        # The end of the process, as its peers see it.
        places[2].porter._loop.run(places[2].porter._joined._world.close, 1)
        time.sleep(0.05)
        ends = [places[rank].enter(GROUP, range(3)) for rank in range(2)]
        wait_until(lambda: all(end.failure() for end in ends))
        for end in ends:
            fault, text = end.failure() or (0, "")
            assert (fault, text) == (1, f"rank 2 (host 127.0.0.1, pid {os.getpid()}) is gone")
        unharmed = [places[rank].enter(b"without it", range(2)) for rank in range(2)]
        time.sleep(0.05)
        assert [end.failure() for end in unharmed] == [None, None]


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_groups_hear_of_each_other_without_rank_0(how: str) -> None:
    with world(4) as places:
        members = [3, 1, 2]
        ends = {rank: places[rank].enter(GROUP, members) for rank in members}
        ends[2].last_call, ends[3].last_call = b"of rank 2", b"of rank 3"
        if how == "leaves":
            places[0].porter.close()
        else:
            places[0].porter._loop.run(places[0].porter._joined._world.close, 1)
        star = places[3].porter._joined._world._star
        wait_until(star.ended)
        ends[3].raise_events(ANXIOUS_EVENT)
        wait_until(lambda: ends[3].calls.get(2) == b"of rank 2")
        assert ends[2].calls[0] == b"of rank 3"
        ends[1].fail_here(Fault.ABORTED, "enough")
        wait_until(lambda: all(end.failure() == (Fault.ABORTED, "enough") for end in ends.values()))


def test_a_failure_that_the_middle_of_the_star_has_not_passed_on_is_told_again() -> None:
    with world(3) as places:
        ends = {rank: places[rank].enter(GROUP, [1, 2]) for rank in (1, 2)}
        places[0].porter._loop.run(lambda: places[0].porter._loop.unwatch(
            places[0].porter._joined._world._star._lines[1]._sock), 1)  # fmt: skip
        ends[1].fail_here(Fault.ABORTED, "enough")
        time.sleep(0.1)
        assert ends[2].failure() is None
        places[0].porter.close()
        wait_until(lambda: ends[2].failure() == (Fault.ABORTED, "enough"))


def test_a_rank_that_left_a_group_may_be_lost() -> None:
    with world(3) as places:
        ends = [place.enter(GROUP, range(3)) for place in places]
        places[2].porter.leave(GROUP)
        wait_until(lambda: ends[0].left and ends[1].left)
        places[2].porter._loop.run(places[2].porter._joined._world.close, 1)
        time.sleep(0.1)
        assert ends[0].failure() is None and ends[1].failure() is None


# ---- where it listens


def test_who_ends_in_the_middle_of_its_proof_is_missing_in_a_circle() -> None:
    """Its secret was right when it joined: whoever meets there may try again without it."""
    with world(2) as places:
        address = places[0].porter.bound[0]
        places[0].porter.close()
        with socket.create_server(address) as listener:

            def end_in_the_middle() -> None:
                sock, _ = listener.accept()
                with sock:
                    greeting = Handshake(b"any", dialing=False, purpose=b"any")
                    sock.sendall(
                        greeting.take(sock.recv(greeting.wanted_bytes, socket.MSG_WAITALL))
                    )
                    sock.recv(greeting.wanted_bytes, socket.MSG_WAITALL)

            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(end_in_the_middle)
                with pytest.raises(RendezvousError, match="closed the connection after our proof"):
                    places[1].porter.rally(b"a circle", [0, 1], b"", 10, lambda: None)
                ended.result()


def test_ports_of_a_range() -> None:
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


def test_only_the_chosen_address() -> None:
    porter = make_porter("127.0.0.2")
    (address, port) = porter.bound[0]
    assert address == "127.0.0.2"
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(("127.0.0.1", port))
    porter.close()


def test_an_address_of_somebody_else() -> None:
    for address in ("192.0.2.1", "a name"):
        with pytest.raises(RendezvousError, match=address):
            make_porter(address)


# ---- life


def test_the_thread_lives_from_join_to_close() -> None:
    before = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    porter = make_porter()
    assert threading.active_count() == before
    with pytest.raises(RendezvousError, match="not joined"):
        porter.leave(GROUP)
    porter.join(world=WORLD, secret=SECRET, rank=0, contacts=contacts_of([porter]), timeout_s=5)
    assert threading.active_count() == before + 1
    porter.close()
    porter.close()
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(AbortedError):
        porter.leave(GROUP)


def test_nothing_is_left_open() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with world(3) as places:
        for place in places:
            place.enter(GROUP, range(3))
            place.porter.reach(GROUP, range(3), 0)
        places[2].enter(b"never entered by others", range(3))
        places[2].porter.reach(b"never entered by others", range(3), 1)
        time.sleep(0.1)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: that is the point
def test_a_forked_child_does_not_disturb_its_parent() -> None:
    before = _open_files()
    with world(2) as places:
        ends = [place.enter(GROUP, range(2)) for place in places]
        child = os.fork()
        if child == 0:
            ok = True
            for place in places:
                try:
                    place.porter.leave(GROUP)
                    ok = False
                except AbortedError:
                    place.porter.close()
            targets = _open_files() - before
            ok = ok and not any("eventpoll" in target for target in targets)
            ok = ok and not any(target.startswith("socket:") for target in targets)
            os._exit(0 if ok else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        for place in places:
            place.porter.reach(GROUP, range(2), 0)
        wait_until(lambda: all(end.sockets for end in ends))
        exchange(ends[0], ends[1], 0, 1)


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: that is the point
def test_a_forked_child_lets_go_of_the_connections_of_groups() -> None:
    before = _open_files()
    with world(2) as places:
        ends = [place.enter(GROUP, range(2)) for place in places]
        for place in places:
            place.porter.reach(GROUP, range(2), 0)
        wait_until(lambda: all(end.sockets for end in ends))
        child = os.fork()
        if child == 0:
            targets = _open_files() - before
            os._exit(any(target.startswith("socket:") for target in targets))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        exchange(ends[0], ends[1], 0, 1)


def _open_files() -> set[str]:
    """What the descriptors of this process are of."""
    found = set()
    for fd in range(3, 512):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_signals_are_left_to_the_main_thread() -> None:
    porter = make_porter()
    porter.join(world=WORLD, secret=SECRET, rank=0, contacts=contacts_of([porter]), timeout_s=5)
    masks = []
    porter._loop.run(lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])), 1)
    porter.close()
    assert signal.SIGINT in masks[0] and signal.SIGTERM in masks[0]
