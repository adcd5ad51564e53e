"""A rank's record of events: its memory has a fixed size, any process may read it, and the rank may
end at any time.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from ranks import Me, Processes
from unisono.config import timeline_settings
from unisono.errors import UnsupportedError
from unisono.timeline import EventKind, RankDump, TimelineWriter, files_of, find_files
from unisono.timeline import timeline_folder as folder_module
from unisono.timeline.event_kinds import ENTRY
from unisono.timeline.timeline_file import ENTRIES_AT, NAMES_BYTES, file_bytes


def writer(folder: Path, events: int = 64) -> TimelineWriter:
    return TimelineWriter(rank=1, size=4, job="job", events=events, folder=folder)


def names(dump: RankDump) -> list[str]:
    return [dump.name_of(event) for event in dump.events]


def test_events_come_back_in_order_with_all_fields(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    timeline.record(EventKind.SUBMITTED, "a", 5, 1 << 40)
    timeline.record(EventKind.WAITED, "b", -1, -7, 123, 456)
    dump = timeline.dump()
    assert (dump.rank, dump.size, dump.job, dump.pid) == (1, 4, "job", os.getpid())
    assert (dump.lost, dump.torn, names(dump)) == (0, 0, ["a", "b"])
    first, second = dump.events
    assert (first["kind"], first["number"], first["value"]) == (EventKind.SUBMITTED, 5, 1 << 40)
    assert (second["number"], second["value"]) == (-1, -7)
    assert (second["begun_ns"], second["ended_ns"]) == (123, 456)
    assert dump.now_ns <= first["time_ns"] <= second["time_ns"]
    assert dump.names[first["thread"]] == threading.current_thread().name


def test_a_full_ring_keeps_the_last_events_in_the_same_memory(tmp_path: Path) -> None:
    timeline = writer(tmp_path, events=64)
    assert timeline.path is not None
    size = timeline.path.stat().st_size
    for index in range(1000):
        timeline.record(EventKind.SUBMITTED, "x", index)
    dump = timeline.dump()
    assert dump.events["number"].tolist() == list(range(936, 1000))
    assert dump.lost == 936
    assert timeline.path.stat().st_size == size == file_bytes(64)


def test_names_beyond_the_table_have_no_name_but_an_event(tmp_path: Path) -> None:
    timeline = writer(tmp_path, events=128)
    count = NAMES_BYTES // 102 + 50  # each name takes 2 + 100 bytes
    for index in range(count):
        timeline.record(EventKind.SUBMITTED, f"{index:0100d}", index)
    timeline.record(EventKind.SUBMITTED, f"{0:0100d}")  # this name is already in the table
    dump = timeline.dump()
    assert len(dump.names) < count
    assert names(dump)[-2:] == ["(name table full)", f"{0:0100d}"]
    # the events keep their place without a name
    assert dump.events["number"].tolist()[-2] == count - 1


@pytest.mark.parametrize("name", ["", "é" * 300, "layer" * 100 + ".weight", "\ud800"])
def test_odd_names_can_be_recorded(tmp_path: Path, name: str) -> None:
    timeline = writer(tmp_path)
    timeline.record(EventKind.SUBMITTED, name)
    timeline.record(EventKind.SUBMITTED, "next")
    found, after = names(timeline.dump())
    assert after == "next"
    assert len(found.encode()) <= 200
    if len(name) > 200:
        assert found[:10] == name[:10] and found[-5:] == name[-5:] and "..." in found


def test_threads_record_without_loss(tmp_path: Path) -> None:
    timeline = writer(tmp_path, events=8192)

    def record(thread: int) -> None:
        for index in range(1000):
            timeline.record(EventKind.SUBMITTED, f"thread {thread}", index)

    threads = [threading.Thread(target=record, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dump = timeline.dump()
    assert dump.torn == 0 and len(dump.events) == 6000
    for thread_number in range(6):
        mine = [e["number"] for e in dump.events if dump.name_of(e) == f"thread {thread_number}"]
        assert mine == list(range(1000))


def test_a_reader_never_sees_half_an_event(tmp_path: Path) -> None:
    timeline = writer(tmp_path, events=64)
    stop = threading.Event()

    def record() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            timeline.record(EventKind.WAITED, "x", number, number, number, number)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(200):
            events = timeline.dump().events
            for field in ("value", "begun_ns", "ended_ns"):
                assert (events[field] == events["number"]).all()
    finally:
        stop.set()
        thread.join()


def test_an_entry_that_a_killed_process_left_unfinished_is_counted(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    for index in range(3):
        timeline.record(EventKind.SUBMITTED, "x", index)
    assert timeline.path is not None
    content = bytearray(timeline.path.read_bytes())
    at = ENTRIES_AT + 2 * ENTRY.size  # position of the second event
    content[at + ENTRY.size - 8 : at + ENTRY.size] = bytes(8)
    dump = RankDump.parse(bytes(content))
    assert dump.torn == 1 and dump.events["number"].tolist() == [0, 2]


def test_facts_survive_a_kill_while_they_are_replaced(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    timeline.keep(RuntimeError("first"))
    assert timeline.path is not None
    content = timeline.path.read_bytes()
    assert RankDump.parse(content).failure == "RuntimeError: first"
    # damages the first copy of the facts, then the second copy
    for at in (96 + 20, 96 + 2000 + 20):
        damaged = bytearray(content)
        damaged[at] ^= 1
        assert RankDump.parse(bytes(damaged)).rank == 1
    for at in (96 + 20, 96 + 2000 + 20):
        content = content[:at] + b"?" + content[at + 1 :]
    with pytest.raises(ValueError, match="nothing is in it"):
        RankDump.parse(content)


def test_other_files_are_refused(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    assert timeline.path is not None
    content = timeline.path.read_bytes()
    for wrong, says in (
        (b"", "another file"),
        (b"x" * 5000, "another file"),
        (content[:-1], "cut off"),
        (content[:8] + b"\x63" + content[9:], "version 99"),
    ):
        with pytest.raises(ValueError, match=says):
            RankDump.parse(wrong)


def test_zero_events_record_nothing_and_take_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TIMELINE_DIR", str(tmp_path))
    monkeypatch.setenv("UNISONO_TIMELINE_EVENTS", "0")
    timeline = TimelineWriter(rank=0, size=1)
    timeline.record(EventKind.SUBMITTED, "x")
    timeline.keep(RuntimeError("x"))
    assert timeline.path is None and list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="records none"):
        timeline.dump()


def test_the_number_of_events_is_checked() -> None:
    for wrong in ("-1", "63", "x", str(1 << 25)):
        with pytest.raises(ValueError, match="UNISONO_TIMELINE_EVENTS"):
            timeline_settings({"UNISONO_TIMELINE_EVENTS": wrong})


def test_the_file_disappears_with_the_timeline_but_not_after_a_failure(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    path = timeline.path
    assert path is not None and path.exists()
    del timeline
    assert not path.exists()
    timeline = writer(tmp_path)
    path = timeline.path
    timeline.keep(ValueError("of a test"))
    timeline.keep(ValueError("a later one"))
    del timeline
    assert path is not None
    assert RankDump.parse(path.read_bytes()).failure == "ValueError: of a test"


def test_without_room_for_the_file_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    timeline = writer(tmp_path)
    timeline.record(EventKind.SUBMITTED, "x")
    assert timeline.path is None and list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def test_a_full_folder_leads_to_the_next_one(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    path, descriptor = folder_module.make_file(10, [blocked, tmp_path / "second"])
    os.close(descriptor)
    assert path.parent == tmp_path / "second"


def small_file_system(monkeypatch: pytest.MonkeyPatch, nbytes: int, free: int) -> None:
    found = SimpleNamespace(f_frsize=1, f_blocks=nbytes, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


def test_half_of_a_small_shared_memory_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, disk = tmp_path / "shm" / "own", tmp_path / "disk"
    monkeypatch.setattr(folder_module, "_SHARED_MEMORY", tmp_path / "shm")
    for free, expected in ((600, shared), (590, disk)):
        small_file_system(monkeypatch, 1000, free)
        path, descriptor = folder_module.make_file(100, [shared, disk])
        os.close(descriptor)
        assert path.parent == expected


def test_files_of_ended_processes_take_five_percent_of_a_small_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(10):
        (tmp_path / f"{index + 1}-old.timeline").write_bytes(b"x")
    small_file_system(monkeypatch, 100 * file_bytes(64), 100 * file_bytes(64))
    timeline = writer(tmp_path)
    assert len([each for each in find_files((tmp_path,)) if not each.running]) == 5
    assert timeline.path is not None


def test_a_folder_behind_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(PermissionError, match="of this user"):
        folder_module.make_file(10, [tmp_path / "link"])


def test_the_oldest_files_of_ended_processes_are_removed(tmp_path: Path) -> None:
    running = writer(tmp_path)
    for index in range(70):
        path = tmp_path / f"{index + 1}-old.timeline"
        path.write_bytes(b"x")
        os.utime(path, (1e9 + index, 1e9 + index) if index < 3 else None)
    another = writer(tmp_path)
    left = find_files((tmp_path,))
    assert sum(each.running for each in left) == 2
    assert len(left) <= 2 + 64
    assert not {f"{i + 1}-old.timeline" for i in range(3)} & {each.path.name for each in left}
    assert running.path is not None and another.path is not None


def test_a_forked_child_does_not_write_into_its_parents_ring(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    timeline.record(EventKind.SUBMITTED, "parent")
    with warnings.catch_warnings():
        # Python warns about a fork, since this process has threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            timeline.record(EventKind.SUBMITTED, "child")
            timeline._finalizer()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert timeline.path is not None and timeline.path.exists()
    assert names(timeline.dump()) == ["parent"]
    timeline.record(EventKind.SUBMITTED, "parent")
    assert names(timeline.dump()) == ["parent", "parent"]


def record_until_killed(me: Me) -> None:
    timeline = TimelineWriter(rank=me.rank, size=me.size, job=me.name, events=256)
    timeline.record(EventKind.SUBMITTED, "first")
    number = 0
    while True:
        number += 1
        if number == 300:
            me.say("ready", pid=os.getpid())
        timeline.record(EventKind.LAUNCHED, "more", number, number)


def test_the_record_of_a_killed_process_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TIMELINE_DIR", str(tmp_path))
    with Processes(record_until_killed, 1) as processes:
        [ready] = processes.wait_for("ready", [0])
        [running] = files_of(ready["pid"])
        assert running.running
        live = RankDump.parse(running.path.read_bytes())
        processes.signal(0, signal.SIGKILL)
        assert processes.exit_codes() == [-signal.SIGKILL]
        [killed] = files_of(ready["pid"])
        assert not killed.running
        dump = RankDump.parse(killed.path.read_bytes())
        assert len(dump.events) >= 255 and dump.torn <= 1
        assert dump.events["sequence"][-1] >= live.events["sequence"][-1]
        more = dump.events[dump.events["kind"] == EventKind.LAUNCHED]
        assert (more["number"] == more["value"]).all()


def test_a_process_without_timeline_is_named_with_those_that_have_one(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    assert timeline.path is not None
    with pytest.raises(UnsupportedError, match=rf"process 1 has no .* one: {os.getpid()}\."):
        files_of(1, (tmp_path,))
