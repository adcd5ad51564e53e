"""Selection rules as data: matching, file format, precedence, and agreement between ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono
from pretended_hosts import spanning
from ranks import Threads, unique_name
from unisono import Communicator, UnsupportedError, algorithms, config
from unisono.communicator import IntRange, Measured, Rule, Selection
from unisono.communicator.selection_sources import own_table
from unisono.selection import selection_table
from unisono.selection.rules_file import from_json, load, save, to_json
from unisono.selection.selection_table import Layer, SelectionTable, parse_algorithms
from unisono.types import Op

World = Callable[[int], Threads]


def spans() -> st.SearchStrategy[IntRange]:
    def span(least: int, more: int | None) -> IntRange:
        return IntRange(least, None if more is None else least + more)

    return st.builds(span, st.integers(0, 1 << 30), st.none() | st.integers(0, 1 << 30))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    op = draw(st.sampled_from(Op))
    return Rule(
        op=op,
        algorithm=draw(st.sampled_from(algorithms.names(op))),
        nbytes=draw(spans()),
        ranks=draw(spans()),
        hosts=draw(spans()),
        dtype_bytes=draw(st.sampled_from([None, 1, 2, 4, 8, 16])),
        block_bytes=draw(st.none() | st.integers(1, 64).map(lambda pages: pages * 4096)),
        reason=draw(st.sampled_from(["", "a reason"])),
    )


measured = st.builds(
    Measured,
    op=st.sampled_from(Op),
    ranks=st.integers(1, 64),
    nbytes=st.integers(0, 1 << 30),
    algorithm=st.just("direct"),
    time_s=st.floats(1e-9, 1e3),
)
selections = st.builds(
    Selection,
    rules=st.lists(rules(), max_size=5).map(tuple),
    measured=st.lists(measured, max_size=5).map(tuple),
)


@given(selections)
def test_a_selection_survives_its_file(selection: Selection) -> None:
    assert from_json(to_json(selection, {"cpu": "x"})) == selection
    precedence = SelectionTable(layers=(Layer(source="here", selection=selection),), cores=3)
    assert SelectionTable.unpack(precedence.pack()) == precedence


@given(selections, st.sampled_from(Op), st.integers(0, 1 << 31), st.integers(1, 64))
def test_the_first_matching_rule_decides(
    selection: Selection, op: Op, nbytes: int, ranks: int
) -> None:
    found = selection.choose(op, nbytes, ranks=ranks, dtype_bytes=4)
    serving = [
        rule
        for rule in selection.rules
        if rule.op is op
        and rule.nbytes.least <= nbytes
        and (rule.nbytes.most is None or nbytes <= rule.nbytes.most)
        and rule.ranks.least <= ranks
        and (rule.ranks.most is None or ranks <= rule.ranks.most)
        and rule.hosts.least <= 1
        and rule.hosts.most != 0
        and rule.dtype_bytes in (None, 4)
    ]
    assert found == (serving[0] if serving else None)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"algorithm": "ring"}, "rule 2: op is missing"),
        ({"op": "all_reduce"}, "rule 2: algorithm is missing"),
        ({"op": "allreduce", "algorithm": "ring"}, "rule 2: op: expected one of all_reduce"),
        ({"op": "all_reduce", "algorithm": "rings"}, "rule 2: .*no algorithm 'rings'.*ring"),
        ({"op": "all_reduce", "algorithm": "ring", "bytes": 3}, "rule 2: .*unknown field 'bytes'"),
        (
            {"op": "all_reduce", "algorithm": "ring", "nbytes": [4, 3]},
            r"rule 2: nbytes: .*\[4, 3\]",
        ),
        ({"op": "all_reduce", "algorithm": "ring", "ranks": 4}, "rule 2: ranks: .*null.*got 4"),
        ({"op": "all_reduce", "algorithm": "ring", "ranks": [True, 2]}, "rule 2: ranks"),
        ({"op": "all_reduce", "algorithm": "ring", "dtype_bytes": 3}, "rule 2: dtype_bytes"),
        ({"op": "all_reduce", "algorithm": "ring", "block_bytes": 100}, "rule 2: block_bytes"),
        ({"op": "all_reduce", "algorithm": "ring", "block_bytes": "64K"}, "rule 2: block_bytes"),
        ({"op": "all_reduce", "algorithm": 3}, "rule 2: algorithm: expected a string, got 3"),
        ("ring", "rule 2: expected an object"),
    ],
)
def test_errors_name_the_file_rule_and_field(rule: Any, text: str, tmp_path: Path) -> None:
    good = {"op": "broadcast", "algorithm": "chain"}
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({"format": "unisono selection", "version": 1, "rules": [good, rule]})
    )
    with pytest.raises(UnsupportedError, match=text) as caught:
        load(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON: .*line 1"),
        ("[]", "expected"),
        ('{"format": "unisono selection", "version": 2}', "expected version 1, got 2"),
        ('{"format": "unisono selection", "version": 1, "rule": []}', "unknown field 'rule'"),
        ('{"format": "unisono selection", "version": 1, "rules": {}}', "expected a list"),
        (
            '{"format": "unisono selection", "version": 1, "measured": '
            '[{"op": "scan", "ranks": 2, "nbytes": 8, "algorithm": "chain", "time_s": 0}]}',
            "measured 1: time_s: expected a number of seconds above 0, got 0",
        ),
    ],
)
def test_an_invalid_selection_text_is_rejected(text: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        from_json(text)


def test_a_file_is_written_atomically_with_a_rule_per_line(tmp_path: Path) -> None:
    rule = Rule(op=Op.SCAN, algorithm="chain", nbytes=IntRange(0, 8))
    path = tmp_path / "new" / "selection.json"
    save(Selection(rules=(rule, rule)), path)
    save(Selection(rules=(rule,)), path, {"cores": 2})
    assert '    {"op": "scan", "algorithm": "chain", "nbytes": [0, 8]}\n' in path.read_text()
    assert load(path) == Selection(rules=(rule,))
    assert [file.name for file in path.parent.iterdir()] == ["selection.json"]
    with pytest.raises(UnsupportedError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_times_are_interpolated_between_measured_sizes_only() -> None:
    def one(nbytes: int, time_s: float) -> Measured:
        return Measured(op=Op.SCAN, ranks=2, nbytes=nbytes, algorithm="chain", time_s=time_s)

    selection = Selection(measured=(one(100, 1.0), one(10_000, 4.0)))
    assert selection.times_s(Op.SCAN, 100, 2) == {"chain": 1.0}
    assert selection.times_s(Op.SCAN, 1000, 2) == {"chain": pytest.approx(2.0)}
    assert selection.times_s(Op.SCAN, 99, 2) == selection.times_s(Op.SCAN, 1000, 3) == {}


# ---- precedence


def file_with(path: Path, algorithm: str, op: Op = Op.ALL_REDUCE) -> str:
    save(Selection(rules=(Rule(op=op, algorithm=algorithm),)), path)
    return str(path)


def test_arguments_precede_the_environment_which_precedes_files(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}

    def chosen(argument: Selection | None = None) -> tuple[str, str]:
        precedence = own_table(config.settings(environ), argument, 2)
        verdict = precedence.choose(Op.ALL_REDUCE, 8, ranks=2)
        return verdict.rule.algorithm, verdict.source.partition(",")[0]

    assert chosen() == ("one_shot", "built-in")
    file_with(Path(config.tuned_path(environ)), "nhr")
    assert chosen() == ("nhr", "tuned file")
    environ["UNISONO_SELECTION"] = file_with(tmp_path / "mine.json", "ring")
    assert chosen() == ("ring", "UNISONO_SELECTION")
    environ["UNISONO_ALGORITHM"] = "all_reduce=chain; broadcast=chain"
    assert chosen() == ("chain", "UNISONO_ALGORITHM")
    swing = Selection(rules=(Rule(op=Op.ALL_REDUCE, algorithm="swing"),))
    assert chosen(swing) == ("swing", "argument")
    other = Selection(rules=(Rule(op=Op.BROADCAST, algorithm="direct"),))
    assert chosen(other) == ("chain", "UNISONO_ALGORITHM")


@given(st.sampled_from(Op), st.integers(1, 64), st.integers(0, 1 << 40), st.integers(1, 64))
def test_every_call_has_a_matching_rule(op: Op, ranks: int, nbytes: int, cores: int) -> None:
    verdict = SelectionTable(cores=cores).choose(op, nbytes, ranks=ranks)
    assert verdict.rule.serves(op, nbytes, ranks=ranks)
    assert verdict.source == ("built-in" if ranks <= 8 else "cost model")


def test_an_invalid_tuned_file_only_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    tuned = Path(config.tuned_path(environ))
    tuned.parent.mkdir()
    tuned.write_text("{")
    precedence = own_table(config.settings(environ), None, 2)
    assert precedence.layers == ()
    assert "not JSON" in caplog.text and str(tuned) in caplog.text
    with pytest.raises(UnsupportedError, match="not JSON"):
        own_table(config.settings({"UNISONO_SELECTION": str(tuned)}), None, 2)


@pytest.mark.parametrize(
    "text", ["ring", "allreduce=ring", "all_reduce=rings", "=", "all_reduce=ring;ring"]
)
def test_invalid_algorithms_in_the_environment_are_rejected(text: str) -> None:
    with pytest.raises(UnsupportedError, match="UNISONO_ALGORITHM"):
        own_table(config.settings({"UNISONO_ALGORITHM": text}), None, 2)


def test_no_home_directory_gives_no_tuned_file() -> None:
    assert config.tuned_path({}) == ""
    assert parse_algorithms("scan=chain;")[0].algorithm == "chain"


# ---- groups


def selecting(algorithm: str, **options: Any) -> Selection:
    return Selection(rules=(Rule(op=Op.ALL_REDUCE, algorithm=algorithm, **options),))


def algorithm_of(comm: Communicator, nbytes: int = 64) -> str:
    return comm.explain("all_reduce", nbytes).algorithm


def test_all_ranks_use_the_selection_of_rank_0() -> None:
    name = unique_name()
    with Threads(3) as world:

        def check(comm: Communicator) -> list[str]:
            own = selecting(("ring", "nhr", "chain")[comm.rank])
            with unisono.init(comm.rank, 3, name, 20.0, selection=own) as inner:
                found = [algorithm_of(inner)]
                assert inner.all_reduce(np.ones(100)).tolist() == [3] * 100
                child = inner.group([2, 0])
                if child is not None:  # the child inherits the selection that the ranks agreed on
                    found.append(algorithm_of(child))
                    child.close()
                child = inner.split(0, -inner.rank, selection=own)
                assert child is not None  # rank 0 of the child is rank 2 of the parent
                found.append(algorithm_of(child))
                assert child.all_reduce(np.ones(3)).tolist() == [3] * 3
                child.close()
                inner.barrier()
                return found

        assert world.run(check) == [
            ["ring", "ring", "chain"],
            ["ring", "chain"],
            ["ring"] * 2 + ["chain"],
        ]


def test_groups_on_several_hosts_use_their_selection() -> None:
    """Tests that groups on one host and on two hosts use the selection of their rank 0. An
    inherited rule that does not fit the group must raise an error.
    """

    def check(world: Communicator) -> list[str]:
        found = []
        with world.split(0, selection=selecting("torus_rings:dims=2x2")) as comm:
            own = selecting(("ring", "nhr", "chain", "swing")[comm.rank])
            for ranks in ([1, 0], [3, 1]):
                child = comm.group(ranks, selection=own)
                if child is not None:
                    with child:
                        found.append(algorithm_of(child))
                        assert child.all_reduce(np.ones(3)).tolist() == [2] * 3
            child = comm.group([0, 1, 2])
            if child is not None:
                with child, pytest.raises(UnsupportedError, match="chosen by argument"):
                    algorithm_of(child)
            world.barrier()
        return found

    assert spanning(check, [{}] * 4, per_host=2, timeout_s=20) == [
        ["nhr"],
        ["nhr", "swing"],
        [],
        ["swing"],
    ]


def test_the_element_size_and_block_size_of_a_rule_are_used(threads: World, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save(selecting("ring", block_bytes=8192, dtype_bytes=2), path)

    def check(comm: Communicator) -> None:
        child = comm.split(0, selection=path)
        assert child is not None
        with child:
            assert child.explain("all_reduce", 64, dtype_bytes=4).algorithm == "one_shot"
            found = child.explain("all_reduce", 64, dtype_bytes=2)
            assert (found.algorithm, found.block_bytes) == ("ring", 8192)
            assert child.all_reduce(np.ones(9000, np.int16)).sum() == 18000
            assert child.all_reduce(np.ones(9000, np.int32)).sum() == 18000
            x = np.ones(9000)
            assert child.all_reduce(x, algorithm="ring:block_bytes=4096").sum() == 18000
            child.barrier()

    threads(2).run(check)


def test_an_oversized_block_is_rejected_with_its_source(threads: World) -> None:
    def check(comm: Communicator) -> None:
        child = comm.split(0, selection=selecting("ring", block_bytes=1 << 30))
        assert child is not None
        with child:
            with pytest.raises(UnsupportedError, match=r"block_bytes: .*chosen by argument: all_"):
                child.all_reduce(np.ones(3))
            for wrong in ("ring:block_bytes=5", "ring:block_bytes=x"):
                with pytest.raises(UnsupportedError, match="block_bytes"):
                    child.all_reduce(np.ones(3), algorithm=wrong)
            child.barrier()

    threads(2).run(check)
    with pytest.raises(TypeError, match="Selection or a file"):
        unisono.init(0, 1, unique_name(), selection=3)  # type: ignore[arg-type]


def test_a_child_forked_during_a_selection_can_select(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, fastest_between = threading.Event(), selection_table.fastest_between

    def slowly(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        time.sleep(0.3)
        return fastest_between(*args, **kwargs)

    def choose() -> None:
        selection_table.modelled_between.cache_clear()
        SelectionTable(cores=2).choose(Op.ALL_REDUCE, 8, ranks=3, hosts=((0,), (1, 2)))

    monkeypatch.setattr(selection_table, "fastest_between", slowly)
    thread = threading.Thread(target=choose)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.alarm(20)
            choose()
            os._exit(0)
        os._exit(1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
