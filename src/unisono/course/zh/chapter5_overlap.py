"""计算与通信的重叠: a lab of the course (`unisono learn overlap --language zh`)."""

import marimo

app = marimo.App(app_title="计算与通信的重叠")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, picture, wait_for

    return ask, mo, picture, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 5. 计算与通信的重叠

    课程中的例子：GPT-3 有 96 层，每层 12 个梯度。假设一个梯度计算需要 1 ms，交换需要 500 ms。串行执行时，一步需要
    96 x 12 x (1 + 500) ms = 577,152 ms。

    **控制器**可以在计算下一个梯度的同时交换前一个梯度。这种重叠能隐藏 577,152 ms 中的多少？
    """)
    return


@app.cell
def _():
    import numpy as np

    import unisono

    return np, unisono


@app.cell(hide_code=True)
def _(ask):
    hidden = ask(
        {
            "一半：288,576 ms": 288576,
            "几乎全部：576,000 ms": 576000,
            "几乎没有：1,151 ms": 1151,
        }
    )
    hidden
    return (hidden,)


@app.cell
def _(hidden, wait_for):
    wait_for(hidden)

    def step_ms(gradients, compute_ms, exchange_ms, overlaps):
        link_free = 0.0
        for number in range(1, gradients + 1):
            ready = compute_ms * (number if overlaps else gradients)
            link_free = max(link_free, ready) + exchange_ms
        return link_free

    serial_ms = step_ms(96 * 12, 1, 500, overlaps=False)
    overlapped_ms = step_ms(96 * 12, 1, 500, overlaps=True)
    balanced_ms = [step_ms(96 * 12, 1, 1, overlaps) for overlaps in (False, True)]
    serial_ms, overlapped_ms
    return balanced_ms, overlapped_ms, serial_ms, step_ms


@app.cell(hide_code=True)
def _(balanced_ms, hidden, mo, overlapped_ms, serial_ms):
    mo.md(f"""
    预测：{hidden.value} ms。计算结果：重叠后一步需要 {overlapped_ms:,.0f} ms，所以重叠隐藏了 **{serial_ms - overlapped_ms:,.0f} ms**。链路从
    第一个梯度开始就不停工作，仅它自己就需要 576,000 ms。重叠能隐藏计算和通信中较短的一个，不能隐藏较长的一个。如果两者都是 1 ms，
    重叠几乎能把一步的时间减半：从 {balanced_ms[0]:,.0f} ms 到 {balanced_ms[1]:,.0f} ms。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 预测：梯度桶

    每条消息除了字节数之外还有固定的时间（时延）。假设 500 ms 中一半是时延。**梯度桶**（融合缓冲区）把一层的 12 个梯度放进一条消息。
    现在加上重叠，一步需要多长时间？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    fused = ask(
        {
            "约 576 s，和之前一样": 576,
            "约 312 s": 312,
            "约 48 s": 48,
        }
    )
    fused
    return (fused,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    下一个单元格还会真正运行一个较小的例子，24 层，每层 4 个梯度，串行 60 ms：两个进程，各有一个控制器，对每个桶做真实的全归约，
    链路按例子的设定放慢。
    """)
    return


@app.cell
def _(fused, step_ms, wait_for):
    wait_for(fused)
    from unisono.train import Example, overlap_svg, run_overlap

    bucket_ms = 250 + 12 * 250
    fused_ms = step_ms(96, 12, bucket_ms, overlaps=True)

    small = Example.lasting(0.06, ratio=5.0, layers=24, per_layer=4)
    measured = run_overlap(small, ranks=2, rounds=3)
    predicted_and_measured_ms = {
        each.case.name: (1e3 * each.predicted_s, 1e3 * each.measured_s, len(each.case.ends))
        for each in measured.cases
    }
    timeline = overlap_svg(measured)
    return fused_ms, predicted_and_measured_ms, timeline


@app.cell(hide_code=True)
def _(mo, predicted_and_measured_ms):
    lines = ["| 情形 | 消息数 | 预测 | 运行 |", "|---|---|---|---|"]
    for name, (predicted, seen, messages) in predicted_and_measured_ms.items():
        lines.append(f"| {name} | {messages} | {predicted:.1f} ms | {seen:.1f} ms |")
    mo.md("\n".join(lines))
    return


@app.cell
def _(picture, timeline):
    picture(timeline)
    return


@app.cell(hide_code=True)
def _(fused, fused_ms, mo):
    mo.md(f"""
    预测：{fused.value} s。计算结果：**{fused_ms / 1000:.0f} s**。融合消除了 12 次时延中的 11 次，字节数不变。表中是同样的实验：24 层，每层 4 个
    梯度，交换时间是计算时间的 5 倍。“best buckets” 是使一步最早结束的分桶方法；前面的桶较小，使链路尽早开始工作。图中蓝条是全部梯度的计算，每个橙条是一条消息：
    有重叠时，链路在计算梯度的同时工作。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 控制器

    在真实的训练程序中，各 rank 完成梯度的顺序不同。如果 rank 0 先提交第 1 层，而 rank 1 先提交第 3 层，会发生什么？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    order = ask(
        {
            "像第 2 章那样的 MismatchError": "error",
            "错误的和：第 1 层与第 3 层相加": "wrong",
            "正确的和：控制器先商定顺序": "right",
        }
    )
    order
    return (order,)


@app.cell
def _(np, order, unisono, wait_for):
    wait_for(order)

    def different_orders():
        with unisono.init() as comm, unisono.Controller(comm) as controller:
            names = ["layer 1", "layer 2", "layer 3"]
            for _ in range(5):
                gradients = {
                    name: np.full(1000, 10.0 * comm.rank + number)
                    for number, name in enumerate(names)
                }
                handles = [
                    controller.all_reduce(name, gradients[name])
                    for name in (names if comm.rank == 0 else names[::-1])
                ]
                for handle in handles:
                    handle.wait()
            return {name: float(gradients[name][0]) for name in names}

    sums = unisono.run(different_orders, ranks=2)
    sums[0]
    return (sums,)


@app.cell(hide_code=True)
def _(mo, order, sums):
    mo.md(f"""
    预测：{order.value}。运行结果：两个 rank 都得到 **{sums[0]}**。每个 rank 的后台线程收集已就绪的名称；各 rank 商定哪些名称大家都已就绪，
    并把它们一起归约。若干步顺序不变之后，各 rank 就沿用这个顺序，不再协商。
    """)
    return


if __name__ == "__main__":
    app.run()
