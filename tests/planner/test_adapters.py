"""Training of adapters (LoRA), packed documents and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono import planner

LLAMA = planner.load_model("llama3-8b")
JOB = planner.Workload(seq=4096, global_batch=32, micro_batch=1, recompute="none")
ADAPTERS = replace(JOB, trainable="lora:16")
ONE = planner.Layout(dp=8, zero=1)


def predict(job: planner.Workload, layout: planner.Layout = ONE) -> planner.Prediction:
    return planner.predict(LLAMA, "h100:8", layout, job)


def test_states_of_frozen_weights() -> None:
    """Tests the bytes against the number of parameters that peft prints for Llama 3 8B, rank 16 on
    all linear layers: 41,943,040.
    """
    trained = 41_943_040
    for layout, shards in ((ONE, 1), (planner.Layout(dp=8, zero=3), 8)):
        memory = predict(ADAPTERS, layout).memory
        frozen = 2 * LLAMA.parameters / shards
        assert memory["weights"][0] == pytest.approx(frozen + 2 * trained / shards, rel=1e-4)
        assert memory["optimizer"][0] == pytest.approx(12 * trained / 8)
    whole, adapters = predict(JOB), predict(ADAPTERS)
    assert adapters.memory["activations"] == whole.memory["activations"]
    assert adapters.memory_bytes < whole.memory_bytes


def test_tensor_parallelism_divides_one_matrix_of_each_adapter() -> None:
    h, keys, ffn = LLAMA.hidden, LLAMA.key_value_width // 2, LLAMA.ffn
    outputs = [h + h / 4, h + keys / 4, h + keys / 4, h + ffn / 4, h + ffn / 4]
    inputs = [h / 4 + h, ffn / 4 + h]
    layout = planner.Layout(dp=2, tp=4, zero=0)
    optimizer = predict(ADAPTERS, layout).memory["optimizer"][0]
    assert optimizer == 12 * LLAMA.layers * 16 * (sum(outputs) + sum(inputs))


def test_backward_leaves_the_gradients_of_weights_out() -> None:
    whole, adapters = predict(JOB), predict(ADAPTERS)
    assert adapters.time["matmul"] == pytest.approx(2 / 3 * whole.time["matmul"], rel=0.03)
    assert adapters.time["output"] < 0.75 * whole.time["output"]
    assert adapters.time["attention"] == whole.time["attention"]
    assert adapters.time["memory"] > whole.time["memory"]
    assert adapters.time["gradients"] + adapters.time["optimizer"] < 0.01 * adapters.step_s
    attention = predict(replace(JOB, trainable="lora:16:attention"))
    assert attention.step_s < adapters.step_s < whole.step_s
    sharded = planner.Layout(dp=8, zero=3)
    assert predict(ADAPTERS, sharded).time["shards"] < predict(JOB, sharded).time["shards"]
    flops = adapters.mfu * adapters.step_s / (whole.mfu * whole.step_s)
    assert 2 / 3 < flops < 0.75  # attention has no weights


def test_a_search_trains_adapters_where_all_weights_do_not_fit() -> None:
    job = planner.Workload(seq=4096, global_batch=16)
    with pytest.raises(ValueError, match=r"what fits: .*trainable all -> lora:16 \("):
        planner.search("llama3-70b", "h100:8", job)
    found = planner.search("llama3-70b", "h100:8", replace(job, trainable="lora:16"), keep=3)
    for each in found:
        again = planner.predict("llama3-70b", "h100:8", each.layout, each.job)
        assert again.fits and again.step_s == pytest.approx(each.prediction.step_s)


@pytest.mark.parametrize(
    ("model", "trainable", "text"),
    [
        ("llama3-8b", "lora", "trainable must be all, lora:RANK or lora:RANK:attention"),
        ("llama3-8b", "lora:0", "trainable must be"),
        ("qwen3-30b-a3b", "lora:8", "trainable = lora:8:attention works"),
        ("deepseek-v3", "lora:8:attention", "latent attention is not modelled"),
    ],
)
def test_refused_adapters(model: str, trainable: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        planner.predict(
            model, "h100:8", "dp=8", planner.Workload(seq=128, global_batch=8, trainable=trainable)
        )
    assert planner.predict(
        "qwen3-30b-a3b", "h100:8", "dp=8,zero=3,ep=8", replace(JOB, trainable="lora:8:attention")
    ).fits


def test_packed_documents_attend_to_themselves() -> None:
    whole, packed = predict(JOB), predict(replace(JOB, document=512))
    assert packed.time["attention"] == pytest.approx(whole.time["attention"] * 512 / 4096)
    assert packed.time["matmul"] == pytest.approx(whole.time["matmul"])
    assert packed.tokens_per_s > whole.tokens_per_s and packed.mfu < whole.mfu
    assert predict(replace(JOB, document=4096)) == replace(whole, job=replace(JOB, document=4096))
    with pytest.raises(ValueError, match="document must be at most seq = 4096, not 5000"):
        replace(JOB, document=5000)
    with pytest.raises(ValueError, match="packed documents of a model with attention windows"):
        planner.predict("gpt-oss-20b", "h100:8", "dp=8,zero=3", replace(JOB, document=512))


def test_padding_takes_time() -> None:
    whole, padded = predict(JOB), predict(replace(JOB, padding=0.25))
    assert padded.step_s == whole.step_s
    assert padded.tokens_per_s == pytest.approx(0.75 * whole.tokens_per_s)
    assert padded.mfu == pytest.approx(0.75 * whole.mfu)
    assert planner.training_run(padded, tokens=1e9).steps == pytest.approx(
        planner.training_run(whole, tokens=1e9).steps / 0.75, abs=1
    )
    for share in (1, -0.1):
        with pytest.raises(ValueError, match="padding is a share from 0 to less than 1"):
            replace(JOB, padding=share)
