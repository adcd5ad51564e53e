"""拓扑，以及成为瓶颈的链路: a lab of the course (`unisono learn topologies --language zh`)."""

import marimo

app = marimo.App(app_title="拓扑，以及成为瓶颈的链路")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, picture, player, wait_for

    return ask, mo, picture, player, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 4. 拓扑，以及成为瓶颈的链路

    **拓扑**是由 rank、交换机和链路组成的网络。它的成本是链路和交换机的数量。它的价值在于两个 rank 相距多远（**直径**），以及每秒有多少
    字节能穿过网络中间（**对分带宽**）。这里的网络都有 16 个 rank 或稍多，每条链路 100 Gbit/s、1 us。
    """)
    return


@app.cell
def _():
    import unisono
    from unisono import algorithms, show, topology

    return algorithms, show, topology, unisono


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 预测：环形全归约

    环算法只在邻居之间发送。在哪个网络上，64 MiB 的环形全归约会比在 16 个 rank 的环上快很多？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    faster = ask(
        {
            "环面，它的链路多一倍": "torus",
            "胖树，它的链路是三倍": "fat tree",
            "都不会": "none",
        }
    )
    faster
    return (faster,)


@app.cell
def _(algorithms, faster, topology, unisono, wait_for):
    wait_for(faster)
    specs = {
        "ring": "ring:16",
        "torus": "torus:4x4",
        "hypercube": "hypercube:4",
        "fat tree": "fat_tree:4",
        "leaf-spine": "leaf_spine:leaves=4,spines=2,hosts=4",
        "dragonfly": "dragonfly:a=4,p=2,h=1",
        "dragonfly+": "dragonfly_plus:k=4",
    }
    networks = {
        name: topology.parse(spec + ",bandwidth=100Gbit,latency=1us")
        for name, spec in specs.items()
    }

    def simulated_ms(op, algorithm, network, nbytes=64 << 20):
        schedule = algorithms.build(op, algorithm, ranks=network.num_ranks)
        return unisono.simulate(schedule, network, nbytes).time_s * 1e3

    ring_ms = {name: simulated_ms("all_reduce", "ring", each) for name, each in networks.items()}
    exchange_ms = {
        name: simulated_ms("all_to_all", "direct", each) for name, each in networks.items()
    }
    return exchange_ms, networks, ring_ms


@app.cell(hide_code=True)
def _(exchange_ms, mo, networks, ring_ms):
    lines = [
        "| 网络 | rank 数 | 链路数 | 直径 | 对分带宽 | 环形 all_reduce | 直接 all_to_all |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in networks.items():
        lines.append(
            f"| {name} | {each.num_ranks} | {each.num_links} | {each.diameter()} | {each.bisection_Bps() / 1e9:.0f} GB/s "
            f"| {ring_ms[name]:.2f} ms | {exchange_ms[name]:.2f} ms |"
        )
    mo.md("\n".join(lines))
    return


@app.cell(hide_code=True)
def _(exchange_ms, faster, mo, ring_ms):
    mo.md(f"""
    预测：{faster.value}。16 个 rank 的模拟结果：环 {ring_ms["ring"]:.2f} ms，环面 {ring_ms["torus"]:.2f} ms，胖树 {ring_ms["fat tree"]:.2f} ms。
    **都不**更快：这个算法每个 rank 只用一条链路，更多的链路帮不上忙。网络再好，也要有能利用它的算法。

    全交换则不同。它在环上耗时 {exchange_ms["ring"]:.1f} ms，在环面上耗时 {exchange_ms["torus"]:.1f} ms：消息要发往所有 rank，所以对分带宽起决定作用。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 预测：用上环面的所有链路

    `bucket` 同时沿环面的两个轴、在两个方向上运行环算法：每个 rank 的四条链路都用上。在环面上，它的速度是 `ring` 的多少倍？
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    speedup = ask(
        {
            "一样快": 1,
            "2 倍": 2,
            "4 倍": 4,
        }
    )
    speedup
    return (speedup,)


@app.cell
def _(networks, speedup, unisono, wait_for):
    wait_for(speedup)
    compared = unisono.simulator.compare(
        "all_reduce",
        networks["torus"],
        64 << 20,
        names=["ring", "bidirectional_ring", "bucket", "torus_rings", "swing:ports=4"],
    )
    torus_ms = {entry.algorithm: entry.result.time_s * 1e3 for entry in compared}
    bound_ms = unisono.simulator.bound_s("all_reduce", networks["torus"], 64 << 20) * 1e3
    measured_speedup = torus_ms["ring"] / torus_ms["bucket"]
    torus_ms, bound_ms
    return bound_ms, measured_speedup, torus_ms


@app.cell(hide_code=True)
def _(bound_ms, measured_speedup, mo, speedup, torus_ms):
    mo.md(f"""
    预测：{speedup.value} 倍。模拟结果：**{measured_speedup:.2f} 倍**，{torus_ms["bucket"]:.2f} ms。在这个网络上，任何算法都不可能少于
    {bound_ms:.2f} ms，因为每个 rank 只有四条链路。
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 哪条链路最热？

    叶脊网络：4 台叶交换机各接 4 台服务器，但只有 2 台脊交换机，所以上行链路的负载是它能力的两倍。红色链路在全交换中最忙。
    """)
    return


@app.cell
def _(algorithms, networks, picture, show, unisono):
    leaf_spine = networks["leaf-spine"]
    exchange = unisono.simulate(
        algorithms.build("all_to_all", "direct", ranks=16), leaf_spine, 64 << 20, bins=64
    )
    hottest = exchange.link_name(exchange.busiest_link)
    picture(show.link_heat_map(exchange, "all_to_all direct, 64 MiB"))
    return (hottest,)


@app.cell(hide_code=True)
def _(hottest, mo):
    mo.md(f"""
    最忙的链路是 **{hottest}**：它连接叶交换机和脊交换机，而不是服务器的链路。给每台服务器换更快的网卡毫无帮助，增加第三台脊交换机才有用。

    在蜻蜓网络中点击两个节点，可以看到它们之间的路由。
    """)
    return


@app.cell
def _(networks, player, show):
    player(show.network_html(networks["dragonfly"]), height=760)
    return


if __name__ == "__main__":
    app.run()
