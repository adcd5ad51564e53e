"""四堵墙，以及预测的可信度: a lab of the course (`unisono learn walls --language zh`)."""

import marimo

app = marimo.App(app_title="四堵墙，以及预测的可信度")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, picture, wait_for

    return ask, mo, picture, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 7. 四堵墙，以及预测的可信度

    训练大模型的人都会遇到四个限制：**内存墙**（放得下吗？）、**性能墙**（单个设备有多快？）、**通信墙**（交换占多少时间？）和**调优墙**
    （几千种布局中选哪一种？）。本实验给每一堵墙一个数字，然后讨论这些数字可以信到什么程度。

    ## 内存墙

    一个模型有 2000 亿个 float32 参数，仅权重就有 4 字节 x 200e9 = 745 GiB。用 Adam 做混合精度训练时，每个参数还要保存更多：16 位的权重
    和梯度，32 位的权重副本和两个动量。不算激活值，一共多少？
    """)
    return


@app.cell
def _():
    import time

    import numpy as np

    import unisono
    from unisono import planner

    return np, planner, time, unisono


@app.cell(hide_code=True)
def _(ask):
    state = ask(
        {
            "两倍：1,490 GiB": 8,
            "四倍：2,980 GiB": 16,
            "八倍：5,960 GiB": 32,
        }
    )
    state
    return (state,)


@app.cell
def _(state, wait_for):
    wait_for(state)
    bytes_per_parameter = 2 + 2 + 4 + 4 + 4
    weights_GiB, training_GiB = (200e9 * each / 2**30 for each in (4, bytes_per_parameter))
    weights_GiB, training_GiB
    return bytes_per_parameter, training_GiB


@app.cell(hide_code=True)
def _(bytes_per_parameter, mo, state, training_GiB):
    mo.md(f"""
    预测：每个参数 {state.value} 字节。计算结果：**{bytes_per_parameter} 字节**，共 {training_GiB:,.0f} GiB，激活值另计：课程给出的数字是超过
    3,500 GB。没有设备有这么多内存，所以模型必须划分。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 通信墙

    **扩展因子**是 T_n / (n T_1)：n 个设备的吞吐量除以最少设备时的 n 倍。220 亿参数的 GPT-3 在 A100 上训练，每步始终是 512 个序列。从 64 个
    设备增加到 512 个设备，每个设备的吞吐量还剩多少？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    factor = ask(
        {
            "全部": 1.0,
            "约 80% 到 95%": 0.9,
            "约一半": 0.5,
        }
    )
    factor
    return (factor,)


@app.cell
def _(factor, planner, time, wait_for):
    wait_for(factor)
    model = planner.load_model("gpt3-22b")
    work = planner.Workload(seq=2048, global_batch=512)
    began = time.perf_counter()
    best = {count: planner.search(model, f"a100:{count}", work) for count in (64, 128, 256, 512)}
    search_s = time.perf_counter() - began
    fastest = {count: found[0] for count, found in best.items()}
    throughput = {count: 512 / found.prediction.step_s / count for count, found in fastest.items()}
    scale_factor = {count: each / throughput[64] for count, each in throughput.items()}
    return best, fastest, scale_factor, search_s


@app.cell(hide_code=True)
def _(fastest, mo, scale_factor):
    lines = ["| 设备数 | 最快的布局 | 每步 | 扩展因子 |", "|---|---|---|---|"]
    for count, found in fastest.items():
        lines.append(
            f"| {count} | `{found.layout.text()}` | {found.prediction.step_s:.2f} s | {scale_factor[count]:.0%} |"
        )
    mo.md("\n".join(lines))
    return


@app.cell(hide_code=True)
def _(factor, fastest, mo, scale_factor, search_s):
    mo.md(f"""
    预测：{factor.value:.0%}。规划结果：512 个设备时 **{scale_factor[512]:.0%}**。批次大小不变，每个设备的计算变少，而交换不会同样快地变少。如果设备
    增多时批次也增大（弱扩展），扩展因子更接近 1。

    **性能墙**：在 64 块 A100 能完成的运算中，这种布局用上了 {fastest[64].prediction.mfu:.0%}（MFU）。其余时间用于访存、交换和等待。

    **调优墙**：上面的搜索在 {search_s:.1f} s 内考虑了四个集群的所有布局。在真实集群上，试一种布局就要占用所有设备几分钟。

    下图中每一堵墙有一个小图。前三个属于 512 个设备上最快的布局，最后一个把它与其后的布局相比较。
    """)
    return


@app.cell
def _(best, picture, planner):
    of_512 = [found.prediction for found in best[512]]
    picture(planner.bottleneck_svg(of_512, title="GPT-3 22B on 512 A100"))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 预测可以信到什么程度？

    Korthikanti 等人公布的结果（arXiv 2205.05198，表 5）：1750 亿参数的 GPT-3，64 块 A100，tp=8，pp=8，每级三块，批次 64，选择性重计算：
    每步 **13.75 s**。规划器预测这一步的时间。它会有多准？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    error = ask(
        {
            "误差在 1% 以内": 0.01,
            "误差在 20% 以内": 0.2,
            "相差一倍": 1.0,
        }
    )
    error
    return (error,)


@app.cell
def _(error, planner, wait_for):
    wait_for(error)
    published_s = 13.75
    layout = planner.Layout(dp=1, tp=8, pp=8, vpp=3, sequence_parallel=True)
    job = planner.Workload(seq=2048, global_batch=64, micro_batch=1, recompute="selective")
    step = planner.predict("gpt3-175b", "a100:64", layout, job)
    relative_error = step.step_s / published_s - 1
    inside = step.low_s <= published_s <= step.high_s
    print(step.explain())
    return inside, relative_error, step


@app.cell(hide_code=True)
def _(error, inside, mo, relative_error, step):
    mo.md(f"""
    预测：误差在 {error.value:.0%} 以内。规划器的结果是 {step.step_s:.2f} s，误差 **{relative_error:+.0%}**；它给出的区间是 {step.low_s:.1f} 到
    {step.high_s:.1f} s，应包含 80% 的实测结果。公布的时间{"在" if inside else "不在"}区间内。但要注意：这类公布的结果也参与了规划器常数的拟合。对没有参与
    拟合的结果，误差列在规划器页面的 “Errors” 一节。预测更擅长给布局排序，而不是给出准确的秒数；测量您自己的一步，用 `--calibrate`
    交给规划器。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 这台机器能期待什么

    同样的问题，规模小一些：全归约的时间约为时延 + 字节数 / 速率。下面的单元格用两种大小预测第三种，然后测量它。
    """)
    return


@app.cell
def _(np, time, unisono):
    def timed():
        sizes = (1 << 10, 4 << 20, 1 << 20)
        with unisono.init() as comm:
            found = []
            for size in sizes:
                x = np.ones(size // 4, np.float32)
                times = []
                for _ in range(15):
                    comm.barrier()
                    begin = time.perf_counter()
                    comm.all_reduce(x)
                    times.append(time.perf_counter() - begin)
                found.append(sorted(times)[len(times) // 2])
            return found

    small_s, large_s, middle_s = unisono.run(timed, ranks=2)[0]
    rate_Bps = ((4 << 20) - (1 << 10)) / (large_s - small_s)
    expected_s = small_s + ((1 << 20) - (1 << 10)) / rate_Bps
    return expected_s, large_s, middle_s, small_s


@app.cell(hide_code=True)
def _(expected_s, large_s, middle_s, mo, small_s):
    mo.md(f"""
    1 KiB 用了 {small_s * 1e6:.0f} us，4 MiB 用了 {large_s * 1e6:.0f} us，所以 1 MiB 应该是 {expected_s * 1e6:.0f} us。实测：**{middle_s * 1e6:.0f} us**。如果两者
    相差很大，说明有什么不同：另一种大小使用了另一种算法或另一级缓存，或者别的程序占用了处理器。`unisono bench all_reduce -n 2` 测量许多
    大小，交替进行，并给出离散程度。
    """)
    return


if __name__ == "__main__":
    app.run()
