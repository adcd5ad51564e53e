"""算法：编写、证明、破坏、运行: a lab of the course (`unisono learn algorithms --language zh`)."""

import marimo

app = marimo.App(app_title="算法：编写、证明、破坏、运行")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, player, wait_for

    return ask, mo, player, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 3. 算法：编写、证明、破坏、运行

    集合通信操作规定每个 rank 最后拥有什么。**算法**规定谁在什么时候发送什么。在 Unisono 中，算法是一个返回**调度**的函数：调度是按轮次
    列出的传输。您将在这里编写一个算法。本库证明它、画出它、模拟它，并用真实进程运行它，四者用的是同一个对象。

    每个 rank 的向量分成若干**数据块**。`b.reduce(src, chunk, dst)` 发送一个数据块，`dst` 把它加到自己的数据块上。
    `b.copy(src, chunk, dst)` 发送一个数据块，替换 `dst` 的数据块。同一轮次的传输同时进行。
    """)
    return


@app.cell
def _():
    import numpy as np

    import unisono
    from unisono import algorithms, schedule, show, topology
    from unisono.types import Op

    return Op, algorithms, np, schedule, show, topology, unisono


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 编写环算法

    在环算法中，rank r 总是发给 rank r + 1。先让每个数据块沿环走一圈，收集所有贡献（归约分发）；再让完成的数据块沿环走一圈（全收集）。
    """)
    return


@app.cell
def _(Op, schedule):
    def my_ring(ranks):
        b = schedule.Builder(
            schedule.Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=ranks), "my_ring"
        )
        for step in range(ranks - 1):
            for rank in range(ranks):
                b.reduce(rank, (rank - step) % ranks, (rank + 1) % ranks)
            b.next_round()
        for step in range(ranks - 1):
            for rank in range(ranks):
                b.copy(rank, (rank + 1 - step) % ranks, (rank + 1) % ranks)
            b.next_round()
        return b.build()

    return (my_ring,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    8 个 rank 时它需要多少轮？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    rounds = ask(
        {
            "7": 7,
            "8": 8,
            "14": 14,
            "16": 16,
        }
    )
    rounds
    return (rounds,)


@app.cell
def _(my_ring, rounds, schedule, wait_for):
    wait_for(rounds)
    schedule.check(my_ring(8))  # the proof: raises ScheduleError if anything is wrong
    counted = my_ring(8).num_rounds
    return (counted,)


@app.cell(hide_code=True)
def _(counted, mo, rounds):
    mo.md(f"""
    预测：{rounds.value}。计数：**{counted}**，即 2(n - 1)。证明通过。证明用符号代替数值重放每次传输，并对这个 rank 数证明：最后每个 rank
    恰好拥有每份贡献一次；没有 rank 发送它还没有的数据块；同一轮次中没有两次传输写同一个位置。
    """)
    return


@app.cell
def _(my_ring, player, show):
    player(show.html(show.view(my_ring(4), nbytes=64 << 20)))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 破坏它，并阅读证明的回答

    下面是三个常见错误。请预测证明对每个错误的回答。

    **错误一**：全收集少做一轮。
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    first = ask(
        {
            "某份贡献被计算两次": "twice",
            "某个 rank 缺少贡献": "lacks",
            "两次传输写同一个位置": "conflict",
        }
    )
    first
    return (first,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    **错误二**：前半部分中，rank r 每轮都发送数据块 r，忘记了 `- step`。
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    second = ask(
        {
            "某个 rank 缺少贡献": "lacks",
            "某份贡献被计算两次": "twice",
            "两次传输写同一个位置": "conflict",
        }
    )
    second
    return (second,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    **错误三**：所有 rank 在同一轮次用复制把数据块 0 直接发给 rank 0。
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    third = ask(
        {
            "某个 rank 缺少贡献": "lacks",
            "某份贡献被计算两次": "twice",
            "两次传输写同一个位置": "conflict",
        }
    )
    third
    return (third,)


@app.cell
def _(Op, first, schedule, second, third, unisono, wait_for):
    wait_for(first, second, third)

    def broken(ranks, mistake):
        b = schedule.Builder(
            schedule.Collective(op=Op.ALL_REDUCE, ranks=ranks, parts=ranks), f"mistake {mistake}"
        )
        if mistake == 3:
            for rank in range(1, ranks):
                b.copy(rank, 0, 0)
            b.next_round()
        for step in range(ranks - 1):
            for rank in range(ranks):
                b.reduce(rank, (rank if mistake == 2 else rank - step) % ranks, (rank + 1) % ranks)
            b.next_round()
        for step in range(ranks - (2 if mistake == 1 else 1)):
            for rank in range(ranks):
                b.copy(rank, (rank + 1 - step) % ranks, (rank + 1) % ranks)
            b.next_round()
        return b.build()

    def answer_of_the_proof(broken_schedule):
        try:
            schedule.check(broken_schedule)
        except unisono.ScheduleError as error:
            return str(error)
        return "correct"

    answers = [answer_of_the_proof(broken(4, mistake)) for mistake in (1, 2, 3)]
    answers
    return answers, broken


@app.cell(hide_code=True)
def _(answers, first, mo, second, third):
    mo.md(f"""
    预测：{first.value}、{second.value}、{third.value}。证明的回答：

    1. {answers[0]}
    2. {answers[1]}
    3. {answers[2]}

    每个回答都指出 rank、数据块和轮次，所以您知道该改哪一行。用随机数测试也能发现这些错误，但只会说和不对。而且测试只能偶尔发现竞争，
    证明总能发现。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 运行它

    现在由真实进程运行您的调度。如果程序传入有错误的调度，会发生什么？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    runs = ask(
        {
            "返回错误的和": "wrong sum",
            "各 rank 永远等待": "hang",
            "在移动任何数据之前被拒绝": "ScheduleError",
        }
    )
    runs
    return (runs,)


@app.cell
def _(broken, my_ring, np, runs, unisono, wait_for):
    wait_for(runs)

    def program(mine, wrong):
        with unisono.init() as comm:
            x = np.random.default_rng(comm.rank).random(1000)
            total = comm.all_reduce(x.copy(), algorithm=mine)
            try:
                comm.all_reduce(x.copy(), algorithm=wrong)
            except unisono.UnisonoError as error:
                return total, type(error).__name__
            return total, "no error"

    results = unisono.run(program, ranks=4, args=(my_ring(4), broken(4, 1)))
    expected = sum(np.random.default_rng(rank).random(1000) for rank in range(4))
    largest_difference = max(float(np.abs(total - expected).max()) for total, _ in results)
    refusals = [refusal for _, refusal in results]
    return largest_difference, refusals


@app.cell(hide_code=True)
def _(largest_difference, mo, refusals, runs):
    mo.md(f"""
    您的环算法与 NumPy 的和最多相差 {largest_difference:.0e}，原因是加法顺序不同引起的舍入。对有错误的调度，预测：{runs.value}；运行结果：
    全部 {len(refusals)} 个 rank 都得到 **{refusals[0]}**。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 哪个算法最快？

    轮次少，等待就少（时延）；字节少，占用链路的时间就少（带宽）。网络也有影响：这里有 8 台服务器，每台与两个邻居相连，
    每条链路 100 Gbit/s、1 us。64 MiB 时哪个算法最快？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    fastest = ask(
        {
            "`recursive_doubling`": "recursive_doubling",
            "`direct`": "direct",
            "`ring`": "ring",
        }
    )
    fastest
    return (fastest,)


@app.cell
def _(algorithms, fastest, topology, unisono, wait_for):
    wait_for(fastest)
    network = topology.parse("ring:8,bandwidth=100Gbit,latency=1us")
    contestants = [
        "ring",
        "double_ring",
        "direct",
        "halving_doubling",
        "recursive_doubling",
        "double_binary_tree",
    ]
    times_us = {
        size: {
            name: unisono.simulate(
                algorithms.build("all_reduce", name, ranks=8), network, size
            ).time_s
            * 1e6
            for name in contestants
        }
        for size in (8, 64 << 20)
    }
    small, large = times_us[8], times_us[64 << 20]
    return contestants, large, small


@app.cell(hide_code=True)
def _(algorithms, contestants, large, mo, small):
    lines = ["| 算法 | 轮次 | 最忙的 rank 发送 | 8 字节 | 64 MiB |", "|---|---|---|---|---|"]
    for name in contestants:
        each = algorithms.cost("all_reduce", name, ranks=8)
        lines.append(
            f"| `{name}` | {each.rounds} | {float(each.bytes_sent):.2f} N | {small[name]:.1f} us | {large[name] / 1000:.2f} ms |"
        )
    mo.md("\n".join(lines))
    return


@app.cell(hide_code=True)
def _(fastest, large, mo, small):
    mo.md(f"""
    对 64 MiB 的预测：`{fastest.value}`。模拟结果：**`{min(large, key=large.get)}`**；8 字节时是 **`{min(small, key=small.get)}`**。
    `recursive_doubling` 只需要 3 轮，小数据时最好。但它每轮都发送整个向量，还要经过最多四条链路，所以大数据时最慢。环需要 14 轮，但每条
    链路只服务一个邻居，消息之间互不等待。如果用交换机，每对服务器有自己的路径，`direct` 在两种大小下都最快：把 `ring:8` 改成 `star:8`
    试试。因此通信库按
    大小和网络选择算法：`unisono explain all_reduce 64M -n 4` 给出本机的选择，`unisono tune` 用测量来选择。

    分层算法把两种算法组合起来：服务器内部走内存，服务器之间走网络。每一层使用适合自己的算法：
    """)
    return


@app.cell
def _(algorithms, player, schedule, show):
    two_levels = algorithms.build("all_reduce", "level0:mesh@4;level1:ring@2", ranks=8)
    schedule.check(two_levels)
    player(show.html(show.view(two_levels, nbytes=1 << 20)))
    return


if __name__ == "__main__":
    app.run()
