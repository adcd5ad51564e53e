"""MSCCL XML: the reader accepts only correct files and names the place of errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import ScheduleError, UnsupportedError
from unisono.schedule import (
    Collective,
    check,
    from_msccl_xml,
)
from unisono.types import Op

"""A folder with real MSCCL files, which are not part of this project."""


def step(
    number: int,
    kind: str,
    src: str = "i0",
    dst: str = "i0",
    *,
    count: int = 1,
    after: tuple[int, int] = (-1, -1),
    flag: int = 0,
) -> str:
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" '
        f'dstbuf="{dst[0]}" dstoff="{dst[1:]}" cnt="{count}" depid="{after[0]}" '
        f'deps="{after[1]}" hasdep="{flag}"/>'
    )


def program(
    gpus: list[list[tuple[int, int, list[str]]]],
    *,
    coll: str = "allreduce",
    chunks: int = 1,
    in_place: int = 1,
    head: str = "",
    sizes: tuple[int, int, int] | None = None,
    outofplace: int | None = None,
) -> str:
    """Returns the text of an MSCCL file. Each GPU has threadblocks, given as (send peer, receive
    peer, steps).
    """
    out = 1 - in_place if outofplace is None else outofplace
    lines = [
        f'{head}<algo name="test" proto="Simple" nchannels="1" nchunksperloop="{chunks}" '
        f'ngpus="{len(gpus)}" coll="{coll}" inplace="{in_place}" outofplace="{out}" '
        'minBytes="0" maxBytes="0">'
    ]
    for gpu, blocks in enumerate(gpus):
        i, o, s = sizes or (chunks, chunks, 4)
        lines.append(f'<gpu id="{gpu}" i_chunks="{i}" o_chunks="{o}" s_chunks="{s}">')
        for number, (send, receive, steps) in enumerate(blocks):
            lines.append(f'<tb id="{number}" send="{send}" recv="{receive}" chan="0">')
            lines += steps
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def exchange(*, sizes: tuple[int, int, int] = (1, 1, 1)) -> str:
    """Returns a program in which both GPUs send, receive into scratch in one threadblock, and
    reduce in another.
    """
    gpus = [
        [
            (peer, peer, [step(0, "s"), step(1, "r", dst="s0", flag=1)]),
            (-1, -1, [step(0, "re", "s0", "i0", after=(0, 1))]),
        ]
        for peer in (1, 0)
    ]
    return program(gpus, sizes=sizes)


def refusal(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        from_msccl_xml(text)
    return str(caught.value)


def test_staged_exchange_becomes_one_round() -> None:
    schedule = from_msccl_xml(exchange())
    assert schedule.collective == Collective(op=Op.ALL_REDUCE, ranks=2)
    assert (schedule.num_rounds, schedule.scratch, len(schedule.transfers)) == (1, 0, 2)
    assert all(t.reduce for t in schedule.transfers)
    check(schedule)


@pytest.mark.parametrize("kind", ["rrc", "rrcs", "rrs", "rcs"])
def test_fused_steps_equal_their_parts(kind: str) -> None:
    """Tests that a fused step does the same as its parts: receive (r), reduce (r), copy (c) and
    send (s). Data go from GPU 0 to GPU 1 to GPU 2. In the cases `rrc` and `rrcs`, GPU 2 then sends
    the sum to the other GPUs.
    """
    if kind == "rcs":  # broadcast along a chain that starts at GPU 0
        gpus = [
            [(1, -1, [step(0, "s")])],
            [(2, 0, [step(0, "rcs")])],
            [(-1, 1, [step(0, "r")])],
        ]
        schedule = from_msccl_xml(program(gpus, coll="broadcast", sizes=(1, 1, 0)))
        assert schedule.num_rounds == 2
    elif kind == "rrs":  # GPU 1 forwards the sum without storing it, as in a reduce to GPU 2
        gpus = [
            [(1, -1, [step(0, "s")])],
            [(2, 0, [step(0, "rrs")])],
            [(-1, 1, [step(0, "rrc")])],
        ]
        text = program(gpus, coll="reduce", sizes=(1, 1, 0)).replace("<algo", '<algo root="2"')
        schedule = from_msccl_xml(text)
        assert schedule.collective.root == 2
        assert schedule.scratch == 1
    else:
        gpus = [
            [(1, -1, [step(0, "s")]), (-1, 2, [step(0, "r", after=(0, 0))])],
            [(2, 0, [step(0, "rrcs" if kind == "rrcs" else "rrc")])],
            [(0, 1, [step(0, "rrcs")]), (1, -1, [step(0, "s", after=(0, 0))])],
        ]
        gpus[0][0][2][0] = step(0, "s", flag=1)
        gpus[2][0][2][0] = step(0, "rrcs", flag=1)
        if kind == "rrc":
            gpus[1][0][2].append(step(1, "s"))
        gpus[1].append((-1, 2, [step(0, "r", after=(0, len(gpus[1][0][2]) - 1))]))
        gpus[1][0][2][-1] = gpus[1][0][2][-1].replace('hasdep="0"', 'hasdep="1"')
        schedule = from_msccl_xml(program(gpus, sizes=(1, 1, 0)))
        assert schedule.num_rounds == 3
    check(schedule)


def test_out_of_place_keeps_inputs_that_are_read_later() -> None:
    """Tests that an input is kept in scratch if the output at the same location is written before
    the last read of the input. GPU 0 does this.
    """
    gpus = [
        [
            (1, -1, [step(0, "s"), step(1, "s", "i1")]),
            (
                -1,
                1,
                [
                    # o0 = i1 + received i1, which is not the final location
                    step(0, "rrc", "i1", "o0"),
                    step(1, "cpy", "o0", "s0"),
                    step(2, "rrc", "i0", "o0"),
                    step(3, "cpy", "s0", "o1"),
                ],
            ),
        ],
        [
            (0, -1, [step(0, "s", "i1"), step(1, "s", "i0")]),
            (-1, 0, [step(0, "rrc", "i0", "o0"), step(1, "rrc", "i1", "o1")]),
        ],
    ]
    schedule = from_msccl_xml(program(gpus, chunks=2, in_place=0, sizes=(2, 2, 1)))
    check(schedule)
    assert schedule.scratch > 0


def test_a_file_that_claims_in_place_and_out_of_place_must_be_correct_in_both() -> None:
    assert from_msccl_xml(exchange())
    message = refusal(exchange().replace('outofplace="0"', 'outofplace="1"'))
    assert "o[0] of gpu 0 is empty at the end" in message
    neither = exchange().replace('inplace="1"', 'inplace="0"')
    assert "got 0 for both" in refusal(neither.replace('outofplace="1"', 'outofplace="0"'))


def test_errors_name_unknown_operations() -> None:
    for name in ("alltonext", "custom", "alltoallv", "sendrecv"):
        with pytest.raises(UnsupportedError, match=name):
            from_msccl_xml(exchange().replace("allreduce", name))


def without_order(text: str) -> str:
    return text.replace('depid="0" deps="1"', 'depid="-1" deps="-1"')


WRONG = {
    "a read unordered with a write": (
        without_order(exchange()),
        "gpu 0, threadblock 1, step 0 .line 8. reads s.0. of gpu 0, "
        "(unordered with the write|which is empty)",
    ),
    "a write unordered with a read": (
        program(
            [
                [(1, -1, [step(0, "s")]), (-1, 1, [step(0, "r")])],
                [(0, -1, [step(0, "s")]), (-1, 0, [step(0, "r")])],
            ],
            coll="allreduce",
        ),
        "threadblock 1, step 0 .line 15. writes i.0. of gpu 1, unordered with the read by gpu 1",
    ),
    "a deadlock": (
        program([[(1, 1, [step(0, "r"), step(1, "s")])], [(0, 0, [step(0, "r"), step(1, "s")])]]),
        "deadlock: gpu 0, threadblock 0, step 0 .* waits for a message from gpu 1 on channel 0; g",
    ),
    "a send that nobody hears": (
        program([[(1, -1, [step(0, "s")])], [(0, 0, [step(0, "rrc"), step(1, "s")])]]),
        "gpu 1, threadblock 0, step 1 .* sends to gpu 0 on channel 0, but no step there",
    ),
    "a contribution twice": (
        program(
            [
                [(1, -1, [step(0, "s"), step(1, "s")])],
                [(-1, 0, [step(0, "rrc"), step(1, "rrc")])],
            ],
            coll="reduce",
        ),
        "gpu 1, threadblock 0, step 1 .line 11. takes the contribution of gpu 0 twice",
    ),
    "a contribution lost": (
        program([[(1, -1, [step(0, "s")])], [(-1, 0, [step(0, "rrc")])]]),
        "o.0. of gpu 0 lacks the contribution of gpu 1 at the end; last written by the input",
    ),
    "chunks mixed": (
        program(
            [[(1, -1, [step(0, "s", "i1")])], [(-1, 0, [step(0, "rrc")])]],
            chunks=2,
            sizes=(2, 2, 0),
        ),
        "gpu 1, threadblock 0, step 0 .line 9. mixes contributions to chunk",
    ),
    "a wrong place": (
        program(
            [
                [(1, 1, [step(0, "s", "o0"), step(1, "r", dst="o0")])],
                [(0, 0, [step(0, "s", "o1"), step(1, "r", dst="o0")])],
            ],
            coll="allgather",
            chunks=2,
            sizes=(1, 2, 0),
        ),
        "o.0. of gpu 0 holds chunk 1 at the end, expected chunk 0; last written by gpu 0, thr",
    ),
    "different counts": (
        program(
            [
                [(1, -1, [step(0, "s", count=2)])],
                [(-1, 0, [step(0, "rrc"), step(1, "rrc", "i1", "i1")])],
            ],
            chunks=2,
            sizes=(2, 2, 0),
        ),
        "gpu 1, threadblock 0, step 0 .* receives 1 chunks, but gpu 0, .* sends 2",
    ),
    "an empty read": (
        program([[(1, -1, [step(0, "s", "s0")])], [(-1, 0, [step(0, "rrc")])]]),
        "gpu 0, threadblock 0, step 0 .line 4. reads s.0. of gpu 0, which is empty",
    ),
    "no flag": (exchange().replace('hasdep="1"', 'hasdep="0"'), "nor a later one is marked hasdep"),
    "no such threadblock": (
        exchange().replace('depid="0"', 'depid="7"'),
        "waits for threadblock 7, which does not exist",
    ),
    "no peer": (program([[(-1, -1, [step(0, "s")])], []]), "no send peer"),
    "itself": (program([[(0, -1, [step(0, "s")])], []]), "cannot send to gpu 0 of 2"),
    "outside": (exchange(sizes=(1, 1, 0)), "needs s.0:1., but the buffer has 0 chunks"),
    "too many chunks": (exchange(sizes=(2, 1, 1)), "has 2 i chunks, but all_reduce gives it 1"),
    "one connection twice": (
        program([[(1, -1, [step(0, "s")]), (1, -1, [step(0, "s")])], []]),
        "both send to gpu 1 on channel 0",
    ),
    "not a multiple": (
        exchange().replace("allreduce", "allgather"),
        "expected nchunksperloop to be a multiple of 2, got 1",
    ),
    "not XML": ("<algo", "line 1: not XML: unclosed token"),
    "nothing": ("", "not XML: no element found"),
    "another document": ("<html/>", "line 1: <html> is not allowed inside the top"),
    "a missing attribute": (
        exchange().replace(' cnt="1"', "", 1),
        "line 4: <step>: missing attribute cnt",
    ),
    "no number": (
        exchange().replace('cnt="1"', 'cnt="x"', 1),
        "line 4: <step>: expected a number, got cnt='x'",
    ),
    "a huge number": (
        exchange().replace('cnt="1"', f'cnt="{"9" * 5000}"', 1),
        "expected cnt in 1..2147483647, got 9{40}",
    ),
    "a strange type": (
        exchange().replace('"re"', '"xx"', 1),
        "line 8.: expected a type in .*, got 'xx'",
    ),
    "a strange buffer": (
        exchange().replace('srcbuf="i"', 'srcbuf="j"', 1),
        "expected srcbuf to be i, o or s",
    ),
    "a gap": (exchange().replace('tb id="1"', 'tb id="2"'), "expected threadblock 1"),
    "a document type": (
        "<!DOCTYPE algo [<!ENTITY a 'b'>]>" + exchange(),
        "line 1: a document type",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_of_wrong_files_name_the_place(what: str) -> None:
    text, pattern = WRONG[what]
    message = refusal(text)
    assert re.search(pattern, message), message


def test_entities_are_never_expanded() -> None:
    lol = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 9}">' for i in range(1, 30))
    message = refusal(f'<!DOCTYPE algo [<!ENTITY e0 "x">{lol}]>\n<algo name="&e29;"/>')
    assert "a document type is not allowed" in message


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='<>/="algo gpu tb step0123', max_size=60))
def test_random_text_is_rejected(text: str) -> None:
    refusal(text)
