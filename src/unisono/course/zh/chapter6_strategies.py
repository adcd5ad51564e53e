"""并行策略及其组合: a lab of the course (`unisono learn strategies --language zh`)."""

import marimo

app = marimo.App(app_title="并行策略及其组合")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, picture, wait_for

    return ask, mo, picture, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 6. 并行策略及其组合

    大模型同时使用几种划分：服务器内部用张量并行，服务器之间用流水并行，外面再加数据并行。本实验看它们各自的代价：流水的等待时间，
    以及内存。

    ## 预测：气泡

    一个 4 级流水训练 8 个微批次。开始和结束时，各级要等待：这就是**气泡**。反向传播的时间是前向传播的两倍。一级流水有多大比例的时间
    在等待？
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
    预测：{bubble.value:.0%}。模拟结果：GPipe **{bubbles["gpipe"]:.0%}**，1F1B {bubbles["1f1b"]:.0%}，每级两块的交错式 {bubbles["interleaved"]:.0%}。p 级流水、
    m 个微批次的气泡是 (p - 1)/(m + p - 1)：微批次越多越好。每级 v 块的交错式把等待时间除以 v，但消息数是 v 倍。

    GPipe 和 1F1B 的等待一样长。为什么大家都用 1F1B？第一级最多保存的激活值：GPipe 是 {in_flight["gpipe"]:.0f} 个微批次，1F1B 是
    {in_flight["1f1b"]:.0f} 个，交错式是 {in_flight["interleaved"]:.1f} 个（按完整微批次计）。1F1B 节省的是**内存**，不是时间。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 预测：选择哪种组合？

    1750 亿参数的 GPT-3，1024 块 80 GB 的 A100，每步 1536 个 2048 token 的序列。三种布局：

    - `tp=8, dp=128`：服务器内部张量并行，服务器之间数据并行；
    - `tp=8, pp=8, dp=16, zero=1`：再加跨八台服务器的流水并行，并划分优化器状态；
    - `tp=32, pp=8, dp=4`：跨四台服务器的张量并行。

    哪一种**放不进**内存？
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
    lines = ["| 布局 | 每个设备的内存 | 每步 | 一步中最大的部分 |", "|---|---|---|---|"]
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
    预测：`{too_large.value}`。计算结果：**`{max(memory_GB, key=memory_GB.get)}`** 需要 {max(memory_GB.values()):.0f} GB，而设备只有 {capacity_GB:.0f} GB：每个
    设备要保存全部权重、梯度和优化器状态的八分之一。第三种布局放得下，但它的张量并行超出了服务器：每层的全归约要两次穿过网络，一步的
    时间是第二种的 {step_s["tp=32,pp=8,dp=4"] / step_s["tp=8,pp=8,dp=16,zero=1"]:.1f} 倍。

    经验法则：服务器内部用张量并行，服务器之间用流水并行，其余用数据并行。`unisono plan --model gpt3-175b --cluster a100:1024 --batch 1536`
    搜索所有布局；`unisono train text -n 4 --layout dp=2,tp=2 --zero 1` 在本机用这样的组合训练一个小模型。
    """)
    return


if __name__ == "__main__":
    app.run()
