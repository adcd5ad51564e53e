"""Jobs of Megatron-LM, Megatron-Bridge and torchtitan, read from their files. The models are
compared with those of Hugging Face's configurations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unisono import planner
from unisono.commands.main import app
from unisono.job_files import SimilarJob, read_job

LLAMA = """
#!/bin/bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-4}   # ranks of tensor parallelism
MBS=1
GBS=$((MBS * 64 * 4))
MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --vocab-size 128256 --make-vocab-size-divisible-by 16
)
PARALLEL_ARGS="--tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 \\
  --num-layers-per-virtual-pipeline-stage 5 --sequence-parallel --use-distributed-optimizer"
TRAIN_ARGS=(
    --micro-batch-size $MBS --global-batch-size ${GBS} --lr 1.5e-4 --lr-decay-style cosine
    --bf16 --recompute-granularity selective
    --overlap-grad-reduce --my-own-flag 3
)
torchrun --nproc_per_node 8 --nnodes ${SLURM_NNODES} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $PARALLEL_ARGS "${TRAIN_ARGS[@]}" --data-path 0.5 /data/a 0.5 /data/b
"""
DEEPSEEK = """
MODEL_ARGS:
  --num-layers: 61
  --hidden-size: 7168
  --num-attention-heads: 128
  --ffn-hidden-size: 18432
  --vocab-size: 129280
  --swiglu: true
  --normalization: RMSNorm
  --disable-bias-linear: true
  --position-embedding-type: rope
  --untie-embeddings-and-output-weights: true
  --multi-latent-attention: true
  --q-lora-rank: 1536
  --kv-lora-rank: 512
  --qk-head-dim: 128
  --qk-pos-emb-head-dim: 64
  --v-head-dim: 128
  --num-experts: 256
  --moe-router-topk: 8
  --moe-ffn-hidden-size: 2048
  --moe-shared-expert-intermediate-size: 2048
  --moe-layer-freq: ([0]*3+[1]*58)
  --moe-router-num-groups: 8
  --moe-router-group-topk: 4
  --tensor-model-parallel-size: 2
  --expert-model-parallel-size: 64
  --expert-tensor-parallel-size: 1
  --fp8-format: hybrid
"""
TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
[foo]
bar = 1
"""
BRIDGE = """
python run_script.py --model_recipe_name qwen3_235b_a22b_pretrain_config -ng 256 --gpu h100 \\
  -tp 2 -pp 8 -cp 1 -vp 4 -ep 32 -mb 1 -gb 2048 --compute_dtype fp8_cs
model.seq_length=4096 train.train_iters=50 model.some_option=3
"""


def read(folder: Path, text: str, name: str = "job.sh") -> SimilarJob:
    (folder / name).write_text(text)
    return read_job(folder / name)


def test_a_script_of_megatron(tmp_path: Path) -> None:
    job = read(tmp_path, LLAMA)
    assert job.model is not None and job.source == "Megatron-LM"
    assert job.model.parameters == planner.load_model("llama3-70b").parameters
    assert job.devices == 64
    assert job.layout_on(64) == planner.Layout(
        dp=8, tp=4, pp=2, vpp=8, sequence_parallel=True, zero=1
    )
    assert job.workload_on(job.layout_on(64)) == planner.Workload(
        seq=8192, global_batch=256, micro_batch=1, recompute="selective"
    )
    assert "--my-own-flag" in job.unknown and "--overlap-grad-reduce" in job.assumed
    assert {"--lr", "--lr-decay-style", "--data-path"} <= set(job.without_effect)
    assert any("unknown: --my-own-flag" in line for line in job.lines())
    with pytest.raises(ValueError, match=r"= 8 does not divide 12 devices; 8 devices work"):
        job.layout_on(12)


def test_flags_as_yaml_and_experts(tmp_path: Path) -> None:
    job = read(tmp_path, DEEPSEEK, "model_config.yaml")
    known = planner.load_model("deepseek-v3")
    assert job.model is not None
    for name in ("parameters", "active_parameters", "dense_layers", "expert_groups"):
        assert getattr(job.model, name) == getattr(known, name), name
    assert job.workload["precision"] == "fp8" and job.layout["ep"] == 64
    with pytest.raises(ValueError, match=r"--seq is needed: the file does not state it"):
        job.workload_on(planner.Layout(dp=64))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (
            "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --vocab-size 51200 "
            "--max-position-embeddings 2048",
            "gpt3-175b",
        ),
        (
            "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 "
            "--group-query-attention --num-query-groups 4 --ffn-hidden-size 6144 --swiglu "
            "--normalization RMSNorm --disable-bias-linear --qk-layernorm --num-experts 128 "
            "--moe-router-topk 8 --moe-ffn-hidden-size 768 --vocab-size 151936 "
            "--position-embedding-type rope --untie-embeddings-and-output-weights",
            "qwen3-30b-a3b",
        ),
    ],
)
def test_models_of_flags(tmp_path: Path, flags: str, name: str) -> None:
    found = read(tmp_path, flags, "arguments.txt").model
    known = planner.load_model(name)
    assert found is not None and found.parameters == known.parameters
    assert found.active_parameters == known.active_parameters


def test_experts_that_tp_divides_too(tmp_path: Path) -> None:
    base = "--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --seq-length 8"
    whole = read(tmp_path, f"{base} --expert-tensor-parallel-size 1")
    divided = read(tmp_path, base)
    assert whole.layout["ep"] == 8 and not whole.notes
    assert divided.layout["ep"] == 16 and "read as ep 16" in divided.notes[0]


@pytest.mark.parametrize(
    ("script", "option", "reason"),
    [
        ("--seq-length $LENGTH --lr 1", "--seq", "$LENGTH is not set"),
        (
            'S=1024\nif [ "$LONG" = 1 ]; then\nS=8192\nfi\n--seq-length $S',
            "--seq",
            "$S depends on a condition",
        ),
        (
            "--seq-length 8\nif true; then\nA='--tensor-model-parallel-size 8'\nfi\nrun $A",
            "--layout",
            "depends on a condition",
        ),
        ("--seq-length 8 --seq-length 16", "--seq", "has the values 8 and 16"),
        ("--seq-length $((2 * UNKNOWN))", "--seq", "is not set"),
        ("--num-layers 2 --seq-length 8", "--model", "no --hidden-size, --num-attention-heads"),
        ("--recipe gpt9_1b -tp 1 --seq-length 8", "--model", "no model is named 'gpt9-1b'"),
        ("--recipe llama3_8b --seq-length 8", "--layout", "tp, pp, cp, ep are only in the recipe"),
    ],
)
def test_what_a_script_leaves_open(tmp_path: Path, script: str, option: str, reason: str) -> None:
    job = read(tmp_path, script)
    assert reason in job.missing[option]
    if option == "--seq":
        with pytest.raises(ValueError, match="--seq is needed: "):
            job.workload_on(planner.Layout(), global_batch=8)


def test_values_of_conditions_that_agree(tmp_path: Path) -> None:
    script = 'if [ -z "$S" ]; then\nS=1024\nfi\nfor i in 1 2; do echo $i; done\n--seq-length $S'
    assert read(tmp_path, script).workload["seq"] == 1024


def test_branches_of_a_script(tmp_path: Path) -> None:
    """Tests conditions of known values, flags in quotation marks, and commented lines."""
    job = read(
        tmp_path,
        """
set -euo pipefail
DTYPE=${1:-"fp8"}
N=${N:-8}
ARGS=(--seq-length 8 --vocab-size 100
  # --tensor-model-parallel-size 16 \\
  --tensor-model-parallel-size 2)
if [[ "$DTYPE" == "fp8" ]] || [[ -z "$MORE" ]]; then
    ARGS+=( "--fp8-format hybrid" )
elif [ $N -gt 4 ]; then
    ARGS+=( "--seq-length 16" )
else
    ARGS+=( "--seq-length 32" )
fi
if [ $N -lt 4 ]; then ARGS+=( --context-parallel-size 4 ); fi
if [ "$N" = 8 ]; then
    CP=2
else
    CP=1
fi
torchrun --nproc-per-node=$N pretrain_gpt.py "${ARGS[@]}" --context-parallel-size $CP
""",
    )
    assert not job.missing.keys() - {"--model"} and job.devices == 8
    assert job.workload["seq"] == 8 and job.workload["precision"] == "fp8"
    assert dict(job.layout) == {"tp": 2, "cp": 2, "sequence_parallel": False, "zero": 0}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--hybrid-layer-pattern M*M", "--hybrid-layer-pattern is of a model"),
        ("--encoder-num-layers 12", "--encoder-num-layers is of a model"),
        ("; python pretrain_bert.py", "pretrain_bert is of a model"),
    ],
)
def test_models_that_flags_do_not_describe(tmp_path: Path, more: str, reason: str) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 99 "
    sizes += "--seq-length 8 "
    assert read(tmp_path, sizes).model is not None
    job = read(tmp_path, sizes + more)
    assert job.model is None and reason in job.missing["--model"]


def test_windows_and_tokenizers(tmp_path: Path) -> None:
    sizes = "--num-layers 24 --hidden-size 64 --num-attention-heads 2 --seq-length 8 "
    window = "--window-size 128,0 --window-attn-skip-freq 2 --tokenizer-type GPT2BPETokenizer"
    job = read(tmp_path, sizes + window)
    assert job.model is not None and "50257" in job.notes[0]
    assert (job.model.window, job.model.local_layers, job.model.vocab) == (128, 12, 50304)
    named = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3"
    model = read(tmp_path, sizes + named).model
    assert model is not None and model.vocab == 129280
    assert read(tmp_path, sizes).model is None


def test_a_configuration_of_torchtitan(tmp_path: Path) -> None:
    job = read(tmp_path, TITAN, "job.toml")
    assert job.model == planner.load_model("llama3-8b") and job.source == "torchtitan"
    layout = job.layout_on(32)
    assert layout == planner.Layout(dp=16, tp=2, dp_replicate=2, zero=3, sequence_parallel=True)
    work = job.workload_on(layout)
    assert (work.global_batch, work.micro_batch, work.recompute) == (32, 2, "selective")
    assert (work.software, work.precision) == ("torch-fsdp", "fp8")
    assert job.unknown == ("foo.bar",) and job.without_effect == ("job.dump_folder",)


def test_pipelines_of_torchtitan(tmp_path: Path) -> None:
    more = 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n'
    job = read(tmp_path, TITAN.replace("tensor_parallel_degree = 2\n", more), "job.toml")
    layout = job.layout_on(32)
    assert (layout.schedule, layout.vpp, layout.pp) == ("zbv", 2, 2)
    assert job.workload_on(layout).micro_batch == 1
    with pytest.raises(ValueError, match="pipeline_parallel_schedule must be one of"):
        read(
            tmp_path,
            TITAN.replace("[act", 'pipeline_parallel_schedule = "Best"\n[act').replace(
                "tensor_parallel_degree", "pipeline_parallel_degree"
            ),
            "job.toml",
        )


def test_options_of_a_recipe(tmp_path: Path) -> None:
    job = read(tmp_path, BRIDGE)
    assert job.source == "Megatron-Bridge" and job.devices == 256
    assert job.model == planner.load_model("qwen3-235b-a22b")
    assert job.layout_on(256) == planner.Layout(
        dp=16, tp=2, pp=8, vpp=4, ep=32, sequence_parallel=True, zero=1
    )
    assert dict(job.workload) == {
        "seq": 4096,
        "global_batch": 2048,
        "micro_batch": 1,
        "precision": "fp8",
    }
    assert job.unknown == ("--some-option",)
    assert "the fastest recomputation that fits" in job.notes[0]


def test_a_recipe_in_python(tmp_path: Path) -> None:
    job = read(
        tmp_path,
        """
from megatron.bridge.recipes.llama import llama3_70b_pretrain_config as recipe
cfg = recipe()
cfg.model.tensor_model_parallel_size = 4  # ranks of a host
cfg.model.pipeline_model_parallel_size = 4
cfg.model.context_parallel_size = 2
cfg.model.expert_model_parallel_size = 1
cfg.model.virtual_pipeline_model_parallel_size = None
cfg.model.sequence_parallel = True
cfg.model.seq_length = 8192
cfg.train.micro_batch_size = 1
cfg.train.global_batch_size = 128
cfg.train.train_iters = 10
""",
        "job.py",
    )
    assert job.model == planner.load_model("llama3-70b")
    assert job.layout_on(64) == planner.Layout(
        dp=2, tp=4, pp=4, cp=2, sequence_parallel=True, zero=1
    )
    assert dict(job.workload) == {
        "seq": 8192,
        "global_batch": 128,
        "micro_batch": 1,
        "precision": "bf16",
    }


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("job.sh", "echo hello", "no job: expected flags such as"),
        ("job.toml", "[model", "no TOML"),
        ("job.sh", "--seq-length 8 --tensor-model-parallel-size two", "whole number, not 'two'"),
        ("job.sh", "--seq-length 8 --data-parallel-sharding-strategy all", "must be one of"),
    ],
)
def test_files_without_a_job(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(tmp_path, text, name)


def plan(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "150"})
    return result.exit_code, result.output


def test_the_command_predicts_the_job_and_better_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text(LLAMA)
    code, output = plan("--like", "job.sh", "--cluster", "h100", "--keep", 3, "--json", "out.json")
    assert code == 0, output
    for text in ("unknown: --my-own-flag", "h100:64", "better than row 1"):
        assert text in output
    assert "row 1 takes" in output or "no layout is predicted to be faster" in output
    found = json.loads(Path("out.json").read_text())
    step = planner.predict(
        read_job("job.sh").model,  # type: ignore[arg-type]
        "h100:64",
        "dp=8,tp=4,pp=2,vpp=8,sequence_parallel=1,zero=1",
        planner.Workload(seq=8192, global_batch=256, micro_batch=1, recompute="selective"),
    )
    assert found["job"]["step_s"] == pytest.approx(step.step_s)
    assert len(found["layouts"]) == 3
    assert found["layouts"][0]["step_s"] <= step.step_s or not step.fits
    code, output = plan("--like", "job.sh", "--cluster", "a100-40gb:8", "--json", "out.json")
    assert code == 0 and "what fits: " in output and "32 devices (" in output
    assert json.loads(Path("out.json").read_text())["layouts"] == []


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        (LLAMA, (), "--like needs --cluster"),
        (LLAMA, ("--cluster", "h100", "--pareto"), "--like does not go with --pareto"),
        (LLAMA.replace("$TP", "$X"), ("--cluster", "h100"), "--layout is needed: --tensor-model"),
        (LLAMA.replace("--vocab-size 128256", ""), ("--cluster", "h100"), "--model is needed"),
        ("--seq-length 8", ("--cluster", "h100", "--model", "gpt3-1.7b"), "--cluster h100:COUNT"),
        ("--seq-length 8", ("--cluster", "h100:8", "--model", "gpt3-1.7b"), "--batch is needed"),
    ],
)
def test_refusals_of_the_command(
    tmp_path: Path, text: str, arguments: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "job.sh").write_text(text)
    code, output = plan("--like", tmp_path / "job.sh", *arguments)
    assert code == 2 and reason in " ".join(output.replace("│", " ").split()), output
