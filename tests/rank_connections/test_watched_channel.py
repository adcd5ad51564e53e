"""A control channel whose peer reads only when the test requests it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from connection_managers import wait_until
from unisono.rank_connections.control_messages import ControlMessage, MessageKind
from unisono.rank_connections.watched_channel import WatchedChannel
from unisono.transport.event_loop import EventLoop

LAST_CALL_QUERY = ControlMessage(
    kind=MessageKind.LAST_CALL_QUERY, origin=0, to=(1,), body=bytes(40)
)


@contextlib.contextmanager
def channel_and_peer(
    messages: list[ControlMessage],
) -> Iterator[tuple[EventLoop, WatchedChannel, socket.socket]]:
    loop = EventLoop()
    loop.start("test of a line")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    channels: list[WatchedChannel] = []
    loop.run(
        lambda: channels.append(
            WatchedChannel(loop, ours, 2.5, received=messages.append, ended=lambda why: None)
        ),
        5,
    )
    try:
        yield loop, channels[0], peer
    finally:
        loop.run(channels[0].close, 5)
        loop.run(loop.end, 5)
        loop.join(5)
        peer.close()


def query_often(channel: WatchedChannel) -> None:
    for _ in range(1000):
        channel.send_query(LAST_CALL_QUERY)


def received_bytes(peer: socket.socket) -> int:
    peer.settimeout(0.2)
    count = 0
    with contextlib.suppress(TimeoutError):
        while data := peer.recv(1 << 16):
            count += len(data)
    return count


def test_queries_to_a_stopped_process_do_not_fill_its_buffers() -> None:
    messages: list[ControlMessage] = []
    with channel_and_peer(messages) as (loop, channel, peer):
        for _ in range(2):
            loop.run(lambda: query_often(channel), 5)
            assert 8 << 10 < received_bytes(peer) < 16 << 10
            messages.clear()
            peer.send(LAST_CALL_QUERY.pack())  # the peer reads again
            wait_until(lambda: messages)
        loop.run(
            lambda: channel.send(
                ControlMessage(kind=MessageKind.FAILED, origin=0, body=bytes(100_000))
            ),
            5,
        )
        assert received_bytes(peer) > 100_000
