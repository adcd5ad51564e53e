"""Algorithms: write, prove, break, run: a lab of the course (`unisono learn algorithms`)."""

import marimo

app = marimo.App(app_title="Algorithms: write, prove, break, run")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, player, wait_for

    return ask, mo, player, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 3. Algorithms: write, prove, break, run

    A collective says what each rank holds at the end. An **algorithm** says who sends what, and when. In Unisono an algorithm is a
    function that returns a **schedule**: a list of transfers in rounds. You write one here. The library proves it, draws it,
    simulates it and runs it with real processes, and all four use the same object.

    Every rank's vector is divided into **chunks**. `b.reduce(src, chunk, dst)` sends a chunk, and `dst` adds it to its own.
    `b.copy(src, chunk, dst)` sends a chunk that replaces that of `dst`. Transfers of one round run at the same time.
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
    ## Write the ring

    In the ring algorithm, rank r always sends to rank r + 1. First each chunk travels around the ring and collects all
    contributions (reduce-scatter), then the finished chunks travel around once more (all-gather).
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
    How many rounds does it take with 8 ranks?
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
    Predicted: {rounds.value}. Counted: **{counted}**, that is 2(n - 1). The proof passed. It replays every transfer with symbols
    instead of numbers, and shows for this number of ranks: at the end each rank holds every contribution exactly once, no rank
    sends a chunk before it has it, and no two transfers of a round write to the same place.
    """)
    return


@app.cell
def _(my_ring, player, show):
    player(show.html(show.view(my_ring(4), nbytes=64 << 20)))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Break it, and read the proof's answer

    Three mistakes that are easy to make. For each one, predict the proof's answer.

    **Mistake 1.** The all-gather ends one round too early.
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    first = ask(
        {
            "a contribution is counted twice": "twice",
            "a rank misses contributions": "lacks",
            "two transfers write to one place": "conflict",
        }
    )
    first
    return (first,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    **Mistake 2.** In the first half, rank r sends chunk r in every round, without `- step`.
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    second = ask(
        {
            "a rank misses contributions": "lacks",
            "a contribution is counted twice": "twice",
            "two transfers write to one place": "conflict",
        }
    )
    second
    return (second,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    **Mistake 3.** All ranks send their chunk 0 directly to rank 0 in one round, as copies.
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    third = ask(
        {
            "a rank misses contributions": "lacks",
            "a contribution is counted twice": "twice",
            "two transfers write to one place": "conflict",
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
    Predicted: {first.value}, {second.value}, {third.value}. The proof:

    1. {answers[0]}
    2. {answers[1]}
    3. {answers[2]}

    Each answer names the rank, the chunk and the round, so you know which line to correct. A test with random numbers would also
    find these mistakes, but would only say that the sum is wrong. And a test finds a race only sometimes; the proof always does.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Run it

    Now real processes run your schedule. What happens if the program passes the broken one?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    runs = ask(
        {
            "it returns a wrong sum": "wrong sum",
            "the ranks wait forever": "hang",
            "it is refused before any data move": "ScheduleError",
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
    Your ring differs from NumPy's sum by at most {largest_difference:.0e}, from rounding in another order. Predicted for the broken
    schedule: {runs.value}. Run: **{refusals[0]}** on all {len(refusals)} ranks.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Which algorithm is fastest?

    Fewer rounds mean less waiting (latency). Fewer bytes mean less time on the links (bandwidth). The network decides, too: here 8
    servers, each with links of 100 Gbit/s and 1 us to two neighbours. Which algorithm is the fastest for 64 MiB?
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
    lines = [
        "| algorithm | rounds | sent by the busiest rank | 8 bytes | 64 MiB |",
        "|---|---|---|---|---|",
    ]
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
    Predicted for 64 MiB: `{fastest.value}`. Simulated: **`{min(large, key=large.get)}`**; for 8 bytes: **`{min(small, key=small.get)}`**.
    `recursive_doubling` needs only 3 rounds, the best for few bytes. But it sends the whole vector in each round, over up to four
    links, so it is the slowest for many bytes. The ring needs 14 rounds, but uses each link for one neighbour only, so no message waits
    for another. On a switch, where each pair of servers has a path of its own, `direct` would win for both sizes: change `ring:8` to
    `star:8` and see. Libraries therefore choose an algorithm by size and network:
    `unisono explain all_reduce 64M -n 4` tells you the choice for your machine, and `unisono tune` measures it.

    A hierarchical algorithm combines two: inside a server by memory, between servers by the network. Each level uses the algorithm
    that fits it:
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
