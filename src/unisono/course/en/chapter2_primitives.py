"""Primitives, and their parts: a lab of the course (`unisono learn primitives`)."""

import marimo

app = marimo.App(app_title="Primitives, and their parts")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, player, wait_for

    return ask, mo, player, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 2. Primitives, and their parts

    A **rank** is one process of a job. A **collective** is an operation that all ranks of a group call. In this lab you predict
    what each collective does, then four real processes of this machine run it.

    Each rank holds a vector of four elements. Rank 0 holds 0, 1, 2, 3; rank 1 holds 10, 11, 12, 13; rank 2 holds 20, 21, 22, 23;
    rank 3 holds 30, 31, 32, 33. The ones digit is the position, the tens digit the rank.
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
    ## Predict: reduce-scatter

    All ranks call `reduce_scatter` with the sum. What does rank 2 hold afterwards?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    piece = ask(
        {
            "all four sums: 60, 64, 68, 72": (60, 64, 68, 72),
            "the sum at position 2: 68": (68,),
            "its own element at position 2: 22": (22,),
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
    Predicted: {piece.value}. Run: **{held[2]["reduce_scatter"]}**. A reduce-scatter adds all vectors, and gives each rank only its
    own part of the sum. Nobody holds the whole sum, so nobody had to receive all of it. This is why training with sharded
    parameters (ZeRO, FSDP) uses it for gradients.

    All eight collectives, as the four processes ran them ("." where only the root has a result):
    """)
    return


@app.cell(hide_code=True)
def _(held, mo):
    table = ["| collective | rank 0 | rank 1 | rank 2 | rank 3 |", "|---|---|---|---|---|"]
    for op in held[0]:
        cells = [" ".join(map(str, each.get(op, "."))) for each in held]
        table.append("| `" + op + "` | " + " | ".join(cells) + " |")
    mo.md("\n".join(table))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Predict: the bytes of an all-reduce

    Two ways to build an all-reduce of N bytes from other collectives:

    - **reduce, then broadcast**: the sum of all vectors goes to rank 0, and from there to all ranks;
    - **reduce-scatter, then all-gather**: each rank adds one part, then all ranks exchange the parts.

    Both give the same result. With 8 ranks and trees for reduce and broadcast, the busiest rank of the first way sends up to 4N
    bytes. How much does each rank of the second way send?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    volume = ask(
        {
            "8 N: one N for each rank": 8,
            "2 N: once for each half": 2,
            "1.75 N: 7/8 of N in each half": 1.75,
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
    Predicted: {volume.value} N. Computed from the schedules: **{sent["reduce_scatter_all_gather"]} N**, and up to
    {sent["reduce_broadcast"]} N for reduce and broadcast. No all-reduce can send less than 2(n - 1)/n of N per rank, if all ranks
    send equally much: each element must leave n - 1 ranks for the addition, and the sum must reach n - 1 ranks.

    All five identities hold on real ranks. They are the reason why a library needs few building blocks.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    See the second way move: press play, or step with the arrow keys.
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
    ## Predict: one rank calls something else

    Rank 3 calls `broadcast`; the other ranks call `all_reduce`. What happens?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    mistake = ask(
        {
            "all ranks wait forever": "hang",
            "the result is wrong": "wrong",
            "every rank gets an error that names rank 3": "MismatchError",
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
    Predicted: {mistake.value}. Run: **{errors[0][0]}** on {len(errors)} of 4 ranks:

    > {errors[0][1]}

    Each call carries a fingerprint of its operation, type, size and root. Ranks compare the fingerprints while they exchange data,
    so this check is always on. With most other libraries, this program waits forever, or adds the wrong numbers.

    Next: `unisono learn 3`, where you write an algorithm for such a collective.
    """)
    return


if __name__ == "__main__":
    app.run()
