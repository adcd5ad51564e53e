"""One connection of the star, with a peer that reads when the test lets it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from connection_managers import wait_until
from unisono.control.channel import ControlChannel
from unisono.control.messages import ControlMessage, MessageKind
from unisono.transport.event_loop import EventLoop

LOOK = ControlMessage(say=MessageKind.LOOK, origin=0, to=(1,), body=bytes(40))


@contextlib.contextmanager
def line_and_peer(
    heard: list[ControlMessage],
) -> Iterator[tuple[EventLoop, ControlChannel, socket.socket]]:
    loop = EventLoop()
    loop.start("test of a line")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    lines: list[ControlChannel] = []
    loop.run(
        lambda: lines.append(
            ControlChannel(loop, ours, 2.5, heard=heard.append, ended=lambda why: None)
        ),
        5,
    )
    try:
        yield loop, lines[0], peer
    finally:
        loop.run(lines[0].close, 5)
        loop.run(loop.end, 5)
        loop.join(5)
        peer.close()


def ask_often(line: ControlChannel) -> None:
    for _ in range(1000):
        line.ask(LOOK)


def received(peer: socket.socket) -> int:
    peer.settimeout(0.2)
    count = 0
    with contextlib.suppress(TimeoutError):
        while data := peer.recv(1 << 16):
            count += len(data)
    return count


def test_questions_to_a_process_that_is_stopped_do_not_fill_what_its_host_takes() -> None:
    heard: list[ControlMessage] = []
    with line_and_peer(heard) as (loop, line, peer):
        for _ in range(2):
            loop.run(lambda: ask_often(line), 5)
            assert 8 << 10 < received(peer) < 16 << 10
            heard.clear()
            peer.send(LOOK.pack())  # it goes on
            wait_until(lambda: heard)
        loop.run(
            lambda: line.say(ControlMessage(say=MessageKind.FAILED, origin=0, body=bytes(100_000))),
            5,
        )
        assert received(peer) > 100_000
