"""Parallel strategies and their mixtures: a lab of the course (`unisono learn strategies`)."""

import marimo

app = marimo.App(app_title="Parallel strategies and their mixtures")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, picture, wait_for

    return ask, mo, picture, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 6. Parallel strategies and their mixtures

    Large models use several divisions at once: tensor parallelism inside a server, a pipeline across servers, data parallelism around
    both. This lab looks at the price of each: the waiting time of pipelines, and memory.

    ## Predict: the bubble

    A pipeline of 4 stages trains 8 micro batches. At its beginning and end, stages wait for work: the **bubble**. A backward pass
    takes twice as long as a forward pass. Which share of the time does a stage wait?
    """)
    return


@app.cell
def _():
    from unisono import pipeline, planner

    return pipeline, planner


@app.cell(hide_code=True)
def _(ask):
    bubble = ask(
        {
            "4/8 = 50 %": 0.5,
            "3/11 = 27 %": 3 / 11,
            "1/8 = 13 %": 1 / 8,
        }
    )
    bubble
    return (bubble,)


@app.cell
def _(bubble, picture, pipeline, wait_for):
    wait_for(bubble)

    def seconds(task):
        return {"F": 1.0, "B": 2.0}.get(task.kind, 1.0) / chunks_of[name]

    def most_in_flight(orders):
        held = most = 0
        for task in (each for group in orders[0] for each in group):
            held += {"F": 1, "B": -1}.get(task.kind, 0)
            most = max(most, held)
        return most

    chunks_of = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
    runs, in_flight = {}, {}
    for name, chunks in chunks_of.items():
        orders = pipeline.stage_tasks(name, stages=4, microbatches=8, chunks=chunks)
        runs[name] = pipeline.run_tasks(orders, seconds)
        in_flight[name] = most_in_flight(orders) / chunks
    bubbles = {name: run.bubble for name, run in runs.items()}
    picture(pipeline.task_svg(runs))
    return bubbles, in_flight


@app.cell(hide_code=True)
def _(bubble, bubbles, in_flight, mo):
    mo.md(f"""
    Predicted: {bubble.value:.0%}. Simulated: GPipe **{bubbles["gpipe"]:.0%}**, 1F1B {bubbles["1f1b"]:.0%}, interleaved with two chunks per stage
    {bubbles["interleaved"]:.0%}. For p stages and m micro batches the bubble is (p - 1)/(m + p - 1): more micro batches help. Interleaving with v
    chunks divides the waiting time by v, and sends v times as many messages.

    GPipe and 1F1B wait equally long. Why does everyone use 1F1B? The first stage holds the activations of at most
    {in_flight["gpipe"]:.0f} micro batches with GPipe, {in_flight["1f1b"]:.0f} with 1F1B, and {in_flight["interleaved"]:.1f} interleaved (in whole micro batches).
    1F1B saves **memory**, not time.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Predict: which mixture?

    GPT-3 with 175 billion parameters, 1024 A100 with 80 GB, 1536 sequences of 2048 tokens per step. Three layouts:

    - `tp=8, dp=128`: tensor parallelism in each server, data parallelism between servers;
    - `tp=8, pp=8, dp=16, zero=1`: also a pipeline over eight servers, optimizer states divided;
    - `tp=32, pp=8, dp=4`: tensor parallelism over four servers.

    Which one does **not fit** into memory?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    too_large = ask(
        {
            "`tp=32,pp=8,dp=4`": "tp=32,pp=8,dp=4",
            "`tp=8,pp=8,dp=16,zero=1`": "tp=8,pp=8,dp=16,zero=1",
            "`tp=8,dp=128`": "tp=8,dp=128",
        }
    )
    too_large
    return (too_large,)


@app.cell
def _(planner, too_large, wait_for):
    wait_for(too_large)
    job = planner.Workload(seq=2048, global_batch=1536, micro_batch=1, recompute="full")
    layouts = ["tp=8,dp=128", "tp=8,pp=8,dp=16,zero=1", "tp=32,pp=8,dp=4"]
    predictions = {
        layout: planner.predict("gpt3-175b", "a100:1024", layout, job) for layout in layouts
    }
    capacity_GB = predictions[layouts[0]].capacity_bytes / 1e9
    memory_GB = {layout: each.memory_bytes / 1e9 for layout, each in predictions.items()}
    step_s = {layout: each.step_s for layout, each in predictions.items()}
    return capacity_GB, memory_GB, predictions, step_s


@app.cell(hide_code=True)
def _(mo, predictions):
    lines = [
        "| layout | memory of a device | step | largest parts of the step |",
        "|---|---|---|---|",
    ]
    for layout, each in predictions.items():
        parts = sorted(each.time.items(), key=lambda part: -part[1])[:4]
        lines.append(
            f"| `{layout}` | {each.memory_bytes / 1e9:.0f} GB | {each.step_s:.1f} s | "
            + ", ".join(f"{kind} {value:.1f} s" for kind, value in parts)
            + " |"
        )
    mo.md("\n".join(lines))
    return


@app.cell(hide_code=True)
def _(capacity_GB, memory_GB, mo, step_s, too_large):
    mo.md(f"""
    Predicted: `{too_large.value}`. Computed: **`{max(memory_GB, key=memory_GB.get)}`** needs {max(memory_GB.values()):.0f} GB of {capacity_GB:.0f} GB: each
    device would hold an eighth of all weights, gradients and optimizer states. The third layout fits, but its tensor parallelism
    leaves the server: its all-reduces cross the network twice per layer, and the step takes {step_s["tp=32,pp=8,dp=4"] / step_s["tp=8,pp=8,dp=16,zero=1"]:.1f}
    times as long as the second one.

    The rule of thumb: tensor parallelism inside a server, the pipeline across servers, data parallelism for the rest.
    `unisono plan --model gpt3-175b --cluster a100:1024 --batch 1536` searches all layouts, and
    `unisono train text -n 4 --layout dp=2,tp=2 --zero 1` trains a small model with such a mixture on this machine.
    """)
    return


if __name__ == "__main__":
    app.run()
