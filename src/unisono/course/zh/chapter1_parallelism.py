"""模型为什么需要通信: a lab of the course (`unisono learn parallelism --language zh`)."""

import marimo

app = marimo.App(app_title="模型为什么需要通信")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, wait_for

    return ask, mo, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 1. 模型为什么需要通信

    在一个设备上训练大模型有两个障碍：模型放不下，或者数据要训练好几年。所以工作要分给多个 **rank**，而各 rank 必须交换别人算出的
    结果。有四种划分方法，也就有四种要交换的东西。在这个实验中，四个真实进程运行每一种方法，并且必须得到与单个进程相同的结果。
    """)
    return


@app.cell
def _():
    import numpy as np

    import unisono

    return np, unisono


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 数据并行

    每个 rank 有完整的模型和四分之一的批次。反向传播之后，每个 rank 只有自己样本的梯度。

    假设各 rank **不**通信。开始时它们的权重相同。十步之后，它们的权重还相同吗？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    same = ask(
        {
            "相同，因为开始时相同": True,
            "不同，各自跟随自己的样本": False,
        }
    )
    same
    return (same,)


@app.cell
def _(np, same, unisono, wait_for):
    wait_for(same)

    def average_gradients(comm, gradient):
        comm.all_reduce(gradient)  # the sum over all ranks, in place
        gradient /= comm.size

    def train(communicates, steps=10):
        with unisono.init() as comm:
            rng = np.random.default_rng(0)
            inputs, true_weights = rng.standard_normal((64, 5)), np.arange(5.0)
            targets = inputs @ true_weights
            mine = slice(comm.rank, None, comm.size)  # this rank's quarter of the batch
            weights = np.zeros(5)
            for _ in range(steps):
                error = inputs[mine] @ weights - targets[mine]
                gradient = 2 * inputs[mine].T @ error / len(error)
                if communicates:
                    average_gradients(comm, gradient)
                weights -= 0.05 * gradient
            return weights

    alone = unisono.run(train, ranks=1, args=(True,))[0]
    apart = unisono.run(train, ranks=4, args=(False,))
    together = unisono.run(train, ranks=4, args=(True,))
    distance = {
        "without communication": max(float(np.abs(each - apart[0]).max()) for each in apart),
        "average_gradients": max(float(np.abs(each - together[0]).max()) for each in together),
        "average_gradients, to one process": float(np.abs(together[0] - alone).max()),
    }
    distance
    return (distance,)


@app.cell(hide_code=True)
def _(distance, mo, same):
    mo.md(f"""
    预测权重相同：{same.value}。运行结果：没有通信时，两个 rank 的权重最多相差 {distance["without communication"]:.2f}。使用
    `average_gradients` 时，所有 rank 的权重逐位相同，与用完整批次训练的单个进程只差 {distance["average_gradients, to one process"]:.0e}，原因是舍入。

    各 rank 梯度的平均值**就是**整个批次的梯度。所以每步一次全归约，就让四个模型成为一个模型。
    `examples/average_gradients.py` 用 torch 和真实手写数字做同样的事。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 张量并行、流水并行和专家并行

    如果模型放不下，权重也要划分。

    - **张量并行**：每个 rank 有每个矩阵的若干列（或行）。
    - **流水并行**：每个 rank 有若干层，把激活值发给下一个 rank。
    - **专家并行**：每个 rank 有一个专家，每个 token 发往自己专家所在的 rank。

    矩阵 A 按列划分，下一个矩阵 B 按行划分。为了计算 x A B，每个 rank 计算 x A_r B_r。哪个集合通信操作能从这四个乘积得到结果？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    combines = ask(
        {
            "all_gather：把各部分并排放好": "all_gather",
            "all_reduce：把各部分相加": "all_reduce",
            "all_to_all：交换各部分": "all_to_all",
        }
    )
    combines
    return (combines,)


@app.cell
def _(combines, np, unisono, wait_for):
    wait_for(combines)

    def divided_models():
        with unisono.init() as comm:
            rng = np.random.default_rng(1)
            x, a, b = (
                rng.standard_normal((3, 8)),
                rng.standard_normal((8, 16)),
                rng.standard_normal((16, 8)),
            )
            r, n = comm.rank, comm.size

            tensor = comm.all_reduce(x @ a[:, r * 4 : r * 4 + 4] @ b[r * 4 : r * 4 + 4])
            tensor_error = float(np.abs(tensor - x @ a @ b).max())

            layers = rng.standard_normal((n, 8, 8))  # one layer on each rank
            received = x.copy()
            if r > 0:
                comm.recv(received, src=r - 1)
            activation = received @ layers[r]
            if r < n - 1:
                comm.send(activation, dst=r + 1)
            pipeline_error = (
                float(np.abs(activation - x @ np.linalg.multi_dot(layers)).max())
                if r == n - 1
                else 0.0
            )

            tokens = rng.standard_normal((n, 4, 8))[r]  # token i of each rank belongs to expert i
            experts = rng.standard_normal((n, 8, 8))
            arrived = comm.all_to_all(
                tokens
            )  # one token from each rank, all for this rank's expert
            answers = comm.all_to_all(arrived @ experts[r])
            expert_error = float(np.abs(answers - np.einsum("td,tde->te", tokens, experts)).max())
            return {"tensor": tensor_error, "pipeline": pipeline_error, "expert": expert_error}

    errors = unisono.run(divided_models, ranks=4)
    largest = {kind: max(each[kind] for each in errors) for kind in errors[0]}
    largest
    return (largest,)


@app.cell(hide_code=True)
def _(combines, largest, mo):
    mo.md(f"""
    预测：`{combines.value}`。答案是 **`all_reduce`**：x A B 是四个乘积 x A_r B_r 之和。与单个进程的最大差别：张量并行
    {largest["tensor"]:.0e}，流水并行 {largest["pipeline"]:.0e}，专家并行 {largest["expert"]:.0e}。

    | 划分 | 每个 rank 有 | 每一步交换 |
    |---|---|---|
    | 数据 | 全部权重，批次的一部分 | 梯度的 all_reduce |
    | 张量 | 每个矩阵的一部分 | 激活值的 all_reduce，每层两次 |
    | 流水 | 若干层 | 相邻 rank 之间发送和接收激活值 |
    | 专家 | 若干专家 | token 的 all_to_all，往返各一次 |
    """)
    return


if __name__ == "__main__":
    app.run()
