"""Groups in a sandbox that denies memfd_create use other memory or report the reason."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from pathlib import Path

import numpy as np
import pytest

from ranks import Me, Processes
from unisono import RendezvousError

_MEMFD_CREATE, _OPENAT = {"x86_64": (319, 257), "aarch64": (279, 56)}[platform.machine()]
_O_TMPFILE = 0x400000
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
# BPF: load word, jump if equal, jump if bits are set, return
_LOAD, _EQUALS, _HAS, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _THIRD_ARGUMENT = 0, 32  # offsets of fields in seccomp_data


def deny(*steps: tuple[int, int, int, int]) -> None:
    """Adds a system call filter to this process, as a sandbox does; this needs no privileges."""
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    code = ctypes.create_string_buffer(program)
    head = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_SECCOMP, _FILTER, head, 0, 0) == 0, ctypes.get_errno()


def deny_memfd() -> None:
    deny(
        (_LOAD, 0, 0, _NUMBER),
        (_EQUALS, 0, 1, _MEMFD_CREATE),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )


def deny_unnamed_files() -> None:
    deny(
        (_LOAD, 0, 0, _NUMBER),
        (_EQUALS, 0, 3, _OPENAT),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_HAS, 0, 1, _O_TMPFILE),
        (_RETURN, 0, 0, _ERRNO | errno.EACCES),
        (_RETURN, 0, 0, _ALLOW),
    )


def in_a_sandbox(me: Me) -> None:
    deny_memfd()
    comm = me.join()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/#" in line]
    total = comm.all_reduce(np.ones(100_000)).sum()
    deny_unnamed_files()
    with pytest.raises(RendezvousError) as caught:
        comm.group([0, 1])
    me.say("done", mapped=mapped, total=total, text=str(caught.value))


def test_groups_form_without_memfd() -> None:
    with Processes(in_a_sandbox, 2) as ranks:
        for said in ranks.wait_for("done", [0, 1]):
            assert len(said["mapped"]) == 1 and "(deleted)" in said["mapped"][0]
            assert said["total"] == 200_000
            for part in (
                "memfd_create is denied (EPERM", "a file in /dev/shm is not possible (EACCES",
                "Permit memfd_create", "$TMPDIR",
            ):  # fmt: skip
                assert part in said["text"]
