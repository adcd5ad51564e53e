"""Topologies, and the link that limits: a lab of the course (`unisono learn topologies`)."""

import marimo

app = marimo.App(app_title="Topologies, and the link that limits")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, picture, player, wait_for

    return ask, mo, picture, player, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 4. Topologies, and the link that limits

    A **topology** is a network of ranks, switches and links. Its cost is the number of links and switches. Its worth is how far two
    ranks are apart (the **diameter**), and how many bytes per second cross its middle (the **bisection bandwidth**). All networks
    here have 16 ranks or a little more, with 100 Gbit/s and 1 us per link.
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
    ## Predict: the ring all-reduce

    A ring algorithm sends only between neighbours. On which network is the ring all-reduce of 64 MiB much faster than on the ring of
    16 ranks?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    faster = ask(
        {
            "on the torus, it has twice the links": "torus",
            "on the fat tree, it has three times the links": "fat tree",
            "on none of them": "none",
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
        "| network | ranks | links | diameter | bisection | ring all_reduce | direct all_to_all |",
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
    Predicted: {faster.value}. Simulated, for 16 ranks: {ring_ms["ring"]:.2f} ms on the ring, {ring_ms["torus"]:.2f} ms on the torus,
    {ring_ms["fat tree"]:.2f} ms on the fat tree. **None** is faster: the algorithm uses one link per rank, so more links do not help it.
    A network is only as good as the algorithm that uses it.

    The all-to-all is different. On the ring it takes {exchange_ms["ring"]:.1f} ms, on the torus {exchange_ms["torus"]:.1f} ms: its messages go to
    all ranks, so the bisection decides.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Predict: use all links of the torus

    `bucket` runs rings along both axes of the torus at the same time, in both directions: four links per rank, each used in its
    turn. How many times as fast as `ring` is it on the torus?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    speedup = ask(
        {
            "as fast": 1,
            "2 times": 2,
            "4 times": 4,
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
    Predicted: {speedup.value}. Simulated: **{measured_speedup:.2f} times**, {torus_ms["bucket"]:.2f} ms. No algorithm can need less than
    {bound_ms:.2f} ms on this network, because each rank has four links.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Which link melts?

    Leaf-spine, 4 leaf switches with 4 servers each, but only 2 spines: the links upward carry twice what they can. Red links are the
    busiest during an all-to-all.
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
    The busiest link is **{hottest}**: a link between a leaf and a spine, not one of a server. A faster network card in each server
    would change nothing; a third spine would.

    Click on two nodes of the dragonfly to see the route between them.
    """)
    return


@app.cell
def _(networks, player, show):
    player(show.network_html(networks["dragonfly"]), height=760)
    return


if __name__ == "__main__":
    app.run()
