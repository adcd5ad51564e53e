"""Predictions of recommendation models, against closed forms of sent bytes and published steps."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from table_bytes import step_bytes
from unisono import planner
from unisono.planner import Cluster, Layout, Workload, recommendation
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.inputs.devices import device_named
from unisono.planner.recommendation import TABLE_KINDS, Dlrm, TableShape
from unisono.planner.recommendation.dlrm_operators import TABLE_UPDATES
from unisono.planner.step_times.time_tree import TimeNode

RATE = 1e9
DEVICE = replace(device_named("a100"), name="test", link_Bps=RATE, network_Bps=RATE / 4)
IDEAL = default_constants().changed(
    link_share=1.0,
    network_share=1.0,
    exchange_share=1.0,
    link_start_s=0.0,
    link_rank_s=0.0,
    network_start_s=0.0,
    straggler=0.0,
)
"""Constants with which links reach their rates and start at once."""
SHAPE = Dlrm(
    counters=13, width=16, tables=(TableShape(rows=5000, ids=5),) * 8, bottom=(64,), top=(64, 32)
)
JOB = Workload(seq=1, global_batch=4096, precision="tf32")


def predict(shape: Dlrm = SHAPE, devices: int = 8, **options: Any) -> recommendation.DlrmPrediction:
    cluster = Cluster(device=DEVICE, devices=devices, per_host=options.pop("per_host", devices))
    layout = options.pop("layout", Layout(dp=devices))
    job = options.pop("job", JOB)
    return recommendation.predict(shape, cluster, layout, job, **options)


@pytest.mark.parametrize("kind", ["table", "row", "column"])
def test_exchanges_take_the_time_of_the_bytes_that_ranks_send(kind: str) -> None:
    """Tests that the time of exchanges is that of the bytes which the closed forms of the exchange
    count. All ranks have equal loads, so the busiest rank sends as much as any other.
    """
    found = predict(placement=kind, constants=IDEAL)
    sent = step_bytes(found.placement, samples=4096, item_bytes=4)
    assert sent == pytest.approx([sent[0]] * 8)
    assert found.time["exchange"] == pytest.approx(sent[0] / RATE, rel=1e-12)
    dense = 2 * 7 / 8 * 4 * SHAPE.dense_parameters
    assert found.time["gradients"] == pytest.approx(dense / RATE, rel=1e-12)


def test_replicated_tables_only_sum_gradients() -> None:
    found = predict(placement="replicated", constants=IDEAL)
    assert found.time["exchange"] == 0
    assert found.time["gradients"] == pytest.approx(2 * 7 / 8 * 4 * SHAPE.parameters / RATE)


def test_an_exchange_waits_for_the_busiest_rank() -> None:
    """Tests one table on one of four ranks, which sends sums to three others and receives ids."""
    one = replace(SHAPE, tables=(TableShape(rows=5000, ids=5),))
    found = predict(one, devices=4, placement="table", constants=IDEAL)
    arriving = 3 * 1024 * (1 + 5 * 8)
    sums = 3 * 1024 * 16 * 4
    sizes = 3 * 16
    expected = (sizes + arriving + 2 * sums) / RATE
    assert found.time["exchange"] == pytest.approx(expected, rel=1e-12)


def test_exchanges_between_hosts_use_both_kinds_of_links() -> None:
    """Tests 8 devices on hosts of 2: a device sends 1/7 of its bytes inside and 6/7 outside."""
    inside, outside = (predict(constants=IDEAL, placement="table", per_host=n) for n in (8, 2))
    assert outside.time["exchange"] / inside.time["exchange"] == pytest.approx(6 / 7 * 4)
    cluster = Cluster(device=DEVICE, devices=8, per_host=4, network_Bps=1e15)
    fast = recommendation.predict(
        SHAPE, cluster, Layout(dp=8), JOB, placement="table", constants=IDEAL
    )
    assert fast.time["exchange"] / inside.time["exchange"] == pytest.approx(3 / 7)


def test_simulated_exchanges_are_those_of_the_closed_form() -> None:
    from unisono import topology

    network = topology.parse(f"nvswitch:8,bandwidth={RATE * 8}bit")
    cluster = Cluster(device=DEVICE, devices=8, topology=network)
    found = recommendation.predict(
        SHAPE, cluster, Layout(dp=8), JOB, placement="table", constants=IDEAL
    )
    expected = predict(placement="table", constants=IDEAL).time["exchange"]
    assert found.time["exchange"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("update", TABLE_UPDATES)
def test_parts_add_up(update: str) -> None:
    found = predict(table_update=update, layout=Layout(dp=8, zero=1))
    assert sum(found.time.values()) == pytest.approx(found.step_s)
    assert all(seconds >= 0 for seconds in found.time.values())
    assert found.low_s < found.step_s < found.high_s
    assert found.samples_per_s == pytest.approx(4096 / found.step_s)

    def leaves(node: TimeNode) -> float:
        return sum(map(leaves, node.children)) if node.children else node.seconds

    tree = found.explain()
    assert leaves(tree) == pytest.approx(tree.seconds)
    assert "dot products" in str(tree) and "bytes on the busiest rank" in str(tree)


def test_memory_of_the_states() -> None:
    """Tests the bytes of tables and dense states of one device, which has everything."""
    for update, per_element, per_row in (("rows", 4, 4), ("dense", 16, 0)):
        memory = predict(devices=1, table_update=update).memory
        tables = sum(memory[name][0] for name in memory if name.startswith("table"))
        assert tables == SHAPE.table_parameters * per_element + 8 * 5000 * per_row
        dense = sum(memory[name][0] for name in ("weights", "gradients", "optimizer"))
        assert dense == SHAPE.dense_parameters * 16
    halves = predict(devices=2, table_update="dense", layout=Layout(dp=2, zero=1)).memory
    assert sum(halves["tables"]) == SHAPE.table_parameters * 4
    assert halves["optimizer"][0] == SHAPE.dense_parameters * 8 / 2


@pytest.mark.parametrize(
    ("slower", "than"),
    [
        ({"placement": "row"}, {"placement": "table"}),
        ({"table_update": "dense"}, {"table_update": "rows"}),
        ({"job": replace(JOB, micro_batch=128)}, {"job": replace(JOB, micro_batch=512)}),
        ({"job": replace(JOB, global_batch=8192)}, {}),
        ({"job": replace(JOB, precision="fp32")}, {}),
        ({"shape": replace(SHAPE, tables=(TableShape(rows=5000, ids=50),) * 8)}, {}),
        ({"layout": Layout(dp=8)}, {"layout": Layout(dp=8, zero=1)}),
    ],
)
def test_what_makes_a_step_slower(slower: dict[str, Any], than: dict[str, Any]) -> None:
    assert predict(**slower).step_s > predict(**than).step_s


def test_tables_that_need_all_devices_are_placed_within_the_memory() -> None:
    """Tests four equal large tables on four devices that each have room for little more than one
    quarter of all tables, and a batch that must be divided into microbatches.
    """
    tables = (TableShape(rows=1_000_000, ids=1), *(TableShape(rows=100_000, ids=2),) * 9)
    shape = replace(SHAPE, tables=tables)
    whole = shape.table_parameters * 4 * 1.25
    small = replace(DEVICE, memory_bytes=int(whole * 0.3 / 0.985))
    cluster = Cluster(device=small, devices=4, per_host=4)
    found = recommendation.predict(shape, cluster, Layout(dp=4), replace(JOB, global_batch=65536))
    assert found.fits
    free = recommendation.predict(
        shape, Cluster(device=DEVICE, devices=4, per_host=4), Layout(dp=4), found.job
    )
    assert free.memory_bytes > found.memory_bytes
    assert found.job.micro_batch is not None and 65536 // 4 % found.job.micro_batch == 0


@pytest.mark.parametrize(
    ("layout", "job", "text"),
    [
        (Layout(tp=8), {}, "tp = 8 does not divide a recommendation model, only dp does; dp = 8 w"),
        (Layout(dp=4, pp=2), {}, "pp = 2 does not divide"),
        (Layout(dp=8, ep=2), {}, "ep = 2 does not divide"),
        (Layout(dp=8, zero=3), {}, "zero = 3 does not divide .* zero = 1 works"),
        (Layout(dp=4), {}, "dp = 4, but the cluster has 8 devices; dp = 8 uses them"),
        (Layout(dp=8), {"seq": 2}, "seq = 2; seq = 1 works"),
        (Layout(dp=8), {"recompute": "full"}, "recompute = full is not predicted"),
        (Layout(dp=8), {"precision": "fp8"}, "precision: expected one of fp32"),
        (Layout(dp=8), {"software": "torch-fsdp"}, "software = torch-fsdp trains transformers"),
        (Layout(dp=8), {"global_batch": 4100}, "4100 is not one of 8; 4096 is"),
    ],
)
def test_what_is_not_predicted_is_refused(layout: Layout, job: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        predict(layout=layout, job=replace(JOB, **job))


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="table_update: expected rows or dense, got 'all'"):
        predict(table_update="all")
    with pytest.raises(ValueError, match="kind: expected auto or one of table"):
        predict(placement="rows")
    cluster = Cluster(device=DEVICE, devices=8)
    with pytest.raises(ValueError, match="objective = cost is not searched"):
        recommendation.search(SHAPE, cluster, JOB, objective="cost")
    shortest_s = recommendation.search(SHAPE, cluster, JOB)[0].step_s
    with pytest.raises(ValueError, match=f"no step takes 1e-09 s or less.* {shortest_s:.4g} s"):
        recommendation.search(SHAPE, cluster, JOB, longest_s=1e-9)
    large = replace(SHAPE, tables=(TableShape(rows=10**11),))
    with pytest.raises(ValueError, match="nothing fits: the placement"):
        recommendation.search(large, cluster, JOB)


@pytest.mark.parametrize("name", ["search", "pareto_front", "scaling_curve"])
def test_what_is_for_transformers_is_refused(name: str) -> None:
    for model in (SHAPE, "dlrm-mlperf"):
        with pytest.raises(ValueError, match=r"predict and search of unisono.planner.recommend"):
            getattr(planner, name)(model, Cluster(device=DEVICE, devices=8), JOB)


@pytest.mark.parametrize("name", ["predict", "smallest_change", "sensitivity"])
def test_what_is_for_a_layout_of_transformers_is_refused(name: str) -> None:
    cluster = Cluster(device=DEVICE, devices=8)
    with pytest.raises(ValueError, match=r"predict and search of unisono.planner.recommendation"):
        getattr(planner, name)(SHAPE, cluster, Layout(dp=8), JOB)


def test_a_search_orders_all_placements() -> None:
    cluster = Cluster(device=DEVICE, devices=8)
    found = recommendation.search(SHAPE, cluster, JOB)
    assert [each.step_s for each in found] == sorted(each.step_s for each in found)
    every = {
        (kind, zero): recommendation.predict(
            SHAPE, cluster, Layout(dp=8, zero=zero), JOB, placement=kind
        ).step_s
        for kind in ("auto", *TABLE_KINDS)
        for zero in (0, 1)
    }
    assert found[0].step_s == min(every.values())
    least = recommendation.search(SHAPE, cluster, JOB, objective="memory", keep=2)
    assert least[0].memory_bytes == min(each.memory_bytes for each in found)
    assert len(least) == 2


@pytest.mark.parametrize(
    ("devices", "samples", "samples_per_s"),
    [(8, 2048, 284_615), (4, 16384, 1_458_176), (8, 16384, 1_671_168), (8, 65536, 5_373_952)],
)
def test_published_steps_are_in_the_interval(
    devices: int, samples: int, samples_per_s: float
) -> None:
    """Tests the rows of TorchRec's example on A100 with 40 GB (recommendation_v2/torchrec_dlrm/
    README.MD of mlcommons/training) whose tables fit into the devices' memory. No constant was
    fitted to them. torch of that time used tf32 by default.
    """
    found = recommendation.predict(
        recommendation.load_dlrm("dlrm-torchrec"),
        Cluster(device="a100-40gb", devices=devices),
        Layout(dp=devices),
        Workload(seq=1, global_batch=samples, precision="tf32"),
    )
    assert found.low_s < samples / samples_per_s < found.high_s


def test_presets_and_files(tmp_path: Path) -> None:
    for name, billions in (("dlrm-mlperf", 24.0), ("dlrm-dcnv2-mlperf", 26.2)):
        assert recommendation.load_dlrm(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)
    with pytest.raises(ValueError, match="no recommendation model is named 'dlrm-mlprf'; near: d"):
        recommendation.load_dlrm("dlrm-mlprf")
    path = tmp_path / "mine.json"
    document = {"counters": 2, "width": 4, "rows": [9, 8], "ids": [1, 3], "top": [5]}
    path.write_text(json.dumps(document))
    assert recommendation.is_dlrm(path)
    tables = (TableShape(rows=9), TableShape(rows=8, ids=3))
    assert recommendation.load_dlrm(path) == Dlrm(
        counters=2, width=4, tables=tables, bottom=(), top=(5,)
    )
    for changes, text in (
        ({"ids": [1]}, "ids: expected a number for each of 2 tables, got 1"),
        ({"depth": 3}, "unknown fields of a recommendation model: depth"),
    ):
        path.write_text(json.dumps(document | changes))
        with pytest.raises(ValueError, match=re.escape(text)):
            recommendation.load_dlrm(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"interaction": "sum"}, "interaction: expected dot or cross, got 'sum'"),
        ({"cross_rank": 4}, "cross_rank: expected 0 for the interaction dot, got 4"),
        ({"interaction": "cross"}, "cross_layers: expected at least 1 for the interaction cross"),
        ({"top": (0,)}, "top: expected widths of at least 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(SHAPE, **changes)
