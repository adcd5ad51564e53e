"""集合通信原语及其组成: a lab of the course (`unisono learn primitives --language zh`)."""

import marimo

app = marimo.App(app_title="集合通信原语及其组成")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, player, wait_for

    return ask, mo, player, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 2. 集合通信原语及其组成

    **rank** 是作业中的一个进程。**集合通信操作**是通信域内所有 rank 都要调用的操作。在这个实验中，您先预测每个操作的结果，
    再由本机的四个真实进程运行它。

    每个 rank 有一个四元素向量：rank 0 是 0、1、2、3，rank 1 是 10、11、12、13，rank 2 是 20、21、22、23，rank 3 是 30、31、32、33。
    个位是位置，十位是 rank 编号。
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
    ## 预测：归约分发

    所有 rank 调用求和的 `reduce_scatter`（归约分发）。之后 rank 2 得到什么？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    piece = ask(
        {
            "全部四个和：60、64、68、72": (60, 64, 68, 72),
            "位置 2 的和：68": (68,),
            "自己在位置 2 的元素：22": (22,),
        }
    )
    piece
    return (piece,)


@app.cell
def _(np, piece, unisono, wait_for):
    wait_for(piece)

    def every_primitive():
        with unisono.init() as comm:
            x = np.arange(4) + 10 * comm.rank
            after = {
                "broadcast": comm.broadcast(x.copy(), root=0),
                "reduce": comm.reduce(x.copy(), root=0),
                "all_reduce": comm.all_reduce(x.copy()),
                "gather": comm.gather(x[:1], root=0),
                "scatter": comm.scatter(
                    x if comm.rank == 0 else None, out=np.empty(1, x.dtype), root=0
                ),
                "all_gather": comm.all_gather(x[:1]),
                "reduce_scatter": comm.reduce_scatter(x),
                "all_to_all": comm.all_to_all(x),
            }
            if comm.rank != 0:
                del after["reduce"], after["gather"]  # only the root has a result
            return {op: tuple(int(value) for value in np.ravel(held)) for op, held in after.items()}

    held = unisono.run(every_primitive, ranks=4)
    return (held,)


@app.cell(hide_code=True)
def _(held, mo, piece):
    mo.md(f"""
    预测：{piece.value}。运行结果：**{held[2]["reduce_scatter"]}**。归约分发把所有向量相加，每个 rank 只得到和中属于自己的那一部分。
    没有任何 rank 拥有完整的和，所以也没有 rank 需要接收全部数据。参数分片的训练（ZeRO、FSDP）正因此用它处理梯度。

    四个进程实际运行的八个集合通信操作（“.” 表示只有根得到结果）：
    """)
    return


@app.cell(hide_code=True)
def _(held, mo):
    table = ["| 操作 | rank 0 | rank 1 | rank 2 | rank 3 |", "|---|---|---|---|---|"]
    for op in held[0]:
        cells = [" ".join(map(str, each.get(op, "."))) for each in held]
        table.append("| `" + op + "` | " + " | ".join(cells) + " |")
    mo.md("\n".join(table))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 预测：全归约的字节数

    用其他操作组成 N 字节的全归约，有两种方法：

    - **归约加广播**：所有向量之和到达 rank 0，再从那里发给所有 rank；
    - **归约分发加全收集**：每个 rank 累加一部分，再互相交换各部分。

    两种方法的结果相同。在 8 个 rank 上用树做归约和广播时，第一种方法中最忙的 rank 最多发送 4N 字节。第二种方法中每个 rank 发送多少？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    volume = ask(
        {
            "8 N：每个 rank 一份": 8,
            "2 N：两步各一份": 2,
            "1.75 N：每一步是 N 的 7/8": 1.75,
        }
    )
    volume
    return (volume,)


@app.cell
def _(np, unisono, volume, wait_for):
    wait_for(volume)

    def compositions():
        with unisono.init() as comm:
            x = np.arange(8) + 10 * comm.rank
            whole = comm.all_reduce(x.copy())
            tree = comm.broadcast(comm.reduce(x.copy(), root=0), root=0)
            parts = comm.all_gather(comm.reduce_scatter(x))
            gathered = comm.gather(x, root=0)
            everything = comm.broadcast(
                gathered if comm.rank == 0 else np.empty(32, x.dtype), root=0
            )
            back = comm.scatter(gathered, out=np.empty_like(x), root=0)
            return {
                "all_reduce = reduce + broadcast": np.array_equal(whole, tree),
                "all_reduce = reduce_scatter + all_gather": np.array_equal(whole, np.ravel(parts)),
                "all_gather = gather + broadcast": np.array_equal(
                    comm.all_gather(x), everything.reshape(comm.all_gather(x).shape)
                ),
                "scatter is the inverse of gather": np.array_equal(back, x),
                "all_to_all twice changes nothing": np.array_equal(
                    comm.all_to_all(comm.all_to_all(x)), x
                ),
            }

    identities = unisono.run(compositions, ranks=4)[0]
    cost = {
        name: unisono.algorithms.cost("all_reduce", name, ranks=8)
        for name in ("reduce_broadcast", "reduce_scatter_all_gather")
    }
    sent = {name: float(each.bytes_sent) for name, each in cost.items()}
    identities, sent
    return (sent,)


@app.cell(hide_code=True)
def _(mo, sent, volume):
    mo.md(f"""
    预测：{volume.value} N。由调度计算：**{sent["reduce_scatter_all_gather"]} N**；归约加广播最多 {sent["reduce_broadcast"]} N。如果各 rank
    发送量相同，任何全归约每个 rank 至少发送 2(n - 1)/n × N：每个元素要从 n - 1 个 rank 送出去相加，和又要送达 n - 1 个 rank。

    五个恒等式在真实 rank 上都成立。正因为如此，一个通信库只需要很少的基本部件。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    看第二种方法怎样移动数据：按播放键，或用方向键逐步查看。
    """)
    return


@app.cell
def _(player, unisono):
    schedule = unisono.algorithms.build("all_reduce", "reduce_scatter_all_gather", ranks=4)
    player(unisono.show.html(unisono.show.view(schedule, nbytes=1 << 20)))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 预测：一个 rank 调用了别的操作

    rank 3 调用 `broadcast`，其他 rank 调用 `all_reduce`。会发生什么？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    mistake = ask(
        {
            "所有 rank 永远等待": "hang",
            "结果错误": "wrong",
            "每个 rank 都得到指出 rank 3 的错误": "MismatchError",
        }
    )
    mistake
    return (mistake,)


@app.cell
def _(mistake, np, unisono, wait_for):
    wait_for(mistake)

    def one_rank_differs():
        comm = unisono.init(timeout_s=20)
        x = np.ones(4)
        try:
            comm.broadcast(x) if comm.rank == 3 else comm.all_reduce(x)
        except unisono.UnisonoError as error:
            return type(error).__name__, str(error)

    errors = unisono.run(one_rank_differs, ranks=4)
    print(errors[0][1])
    return (errors,)


@app.cell(hide_code=True)
def _(errors, mistake, mo):
    mo.md(f"""
    预测：{mistake.value}。运行结果：4 个 rank 中有 {len(errors)} 个得到 **{errors[0][0]}**：

    > {errors[0][1]}

    每次调用都带有操作、类型、大小和根的指纹。各 rank 在交换数据的同时比较指纹，所以这项检查始终开启。在多数其他通信库中，这个
    程序会永远等待，或者把错误的数相加。

    下一章：`unisono learn 3 --language zh`，您将为这样的操作编写算法。
    """)
    return


if __name__ == "__main__":
    app.run()
