"""Choices of published runs that their scripts state: they fit the published layouts."""

from __future__ import annotations

from published_runs import published_runs, run_of_row

NARAYANAN = "arXiv 2104.04473 table 1"
LAYERS_OF_A_GROUP = {"GPT 76.1B": 5, "GPT 145.6B": 5, "GPT 310.1B": 3, "GPT 529.6B": 1}
"""`--num-layers-per-virtual-pipeline-stage` of run_table_1.sh. The other runs do not interleave."""


def test_narayanan_divides_layers_and_batches_as_its_script() -> None:
    runs = [run for run in published_runs() if run.table_source == NARAYANAN]
    assert len(runs) == 10
    for run in runs:
        groups = run.layout.pp * run.layout.chunks
        assert run.layout.chunks == run.layout.vpp
        expected = LAYERS_OF_A_GROUP.get(run.name, run.model.layers // run.layout.pp)
        assert run.model.layers / groups == expected, run.name
        assert run.job.micro_batch is not None
        microbatches, rest = divmod(run.job.global_batch, run.layout.dp * run.job.micro_batch)
        assert rest == 0 and microbatches % run.layout.pp == 0, run.name
    sizes = {run.job.micro_batch for run in runs if run.layout.tp == 1}
    assert sizes == {16}


def test_megatron_bridge_states_recomputation_and_software() -> None:
    runs = [run for run in published_runs() if run.table_source.startswith("Megatron-Bridge 2")]
    assert all(run.job.recompute in ("none", "selective") for run in runs)
    again = [run for run in runs if run.job.recompute == "selective"]
    assert {run.name for run in again} == {"GPT OSS 120B"}
    assert {run.job.precision for run in again} == {"bf16"}
    newest = [run for run in runs if run.job.software == "megatron-2026"]
    assert newest and all(run.model.experts and run.note.startswith("MXFP8") for run in newest)
    assert {run.table_source.split()[1] for run in newest} == {"26.06", "26.06.01", "26.08"}
    assert {run.cluster.kind.architecture for run in newest} == {"blackwell"}


def test_a_stated_cell_is_kept() -> None:
    """Tests that the scripts' choices fill only empty cells."""
    cells = (
        "device=a100 precision=fp16 layers=60 hidden=10240 heads=80 vocab=51200 gated=0 tied=1 "
        "seq=2048 gpus=1024 tp=8 pp=4 dp=32 sequence_parallel=0 recompute=full global_batch=1792 "
        "measured_s=16"
    )
    row = {"source": NARAYANAN, "model": "GPT 76.1B"}
    row.update(cell.split("=") for cell in cells.split())
    run = run_of_row(row)
    assert (run.job.micro_batch, run.layout.vpp, run.job.recompute) == (2, 3, "full")
    run = run_of_row({**row, "micro_batch": "4", "vpp": "5", "recompute": "selective"})
    assert (run.job.micro_batch, run.layout.vpp, run.job.recompute) == (4, 5, "selective")
    run = run_of_row({**row, "source": "own"})
    assert (run.job.micro_batch, run.layout.vpp) == (None, None)
    run = run_of_row({**row, "source": "Megatron-Bridge 26.06", "recompute": ""})
    assert run.job.recompute is None  # the configurations of this model were not read
