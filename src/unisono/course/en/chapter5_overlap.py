"""Overlap of computation and communication: a lab of the course (`unisono learn overlap`)."""

import marimo

app = marimo.App(app_title="Overlap of computation and communication")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, picture, wait_for

    return ask, mo, picture, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 5. Overlap of computation and communication

    The example of the lectures: GPT-3 has 96 layers with 12 gradients each. Say that a gradient takes 1 ms to compute and 500 ms to
    exchange. In series, one step takes 96 x 12 x (1 + 500) ms = 577,152 ms.

    A **controller** can exchange a gradient while the next one is computed. How much of the 577,152 ms can this overlap hide?
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
            "half of it: 288,576 ms": 288576,
            "nearly all: 576,000 ms": 576000,
            "nearly nothing: 1,151 ms": 1151,
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
    Predicted: {hidden.value} ms. Computed: overlapped, the step takes {overlapped_ms:,.0f} ms, so overlap hides **{serial_ms - overlapped_ms:,.0f}
    ms**. The link works without a pause from the first gradient on, and it alone needs 576,000 ms. Overlap hides the shorter of
    computation and communication, never the longer one. If both took 1 ms, overlap would nearly halve the step: from
    {balanced_ms[0]:,.0f} to {balanced_ms[1]:,.0f} ms.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Predict: buckets

    Each message costs a fixed time (latency) besides its bytes. Say that half of the 500 ms is latency. A **bucket** (fusion buffer)
    puts the 12 gradients of a layer into one message. How long is the step now, with overlap?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    fused = ask(
        {
            "about 576 s, as before": 576,
            "about 312 s": 312,
            "about 48 s": 48,
        }
    )
    fused
    return (fused,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    The next cell also runs a smaller example for real, 24 layers of 4 gradients in 60 ms: two processes, a controller in each, and
    an all-reduce of each bucket over a link that is slowed down as the example says.
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
    lines = ["| case | messages | predicted | run |", "|---|---|---|---|"]
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
    Predicted: {fused.value} s. Computed: **{fused_ms / 1000:.0f} s**. Fusion removes 11 of 12 latencies; the bytes remain. The table shows the
    same for 24 layers of 4 gradients, with an exchange 5 times as long as a computation. "Best buckets" are those that end the step
    first; the first buckets are small, so that the link begins early. In the picture, blue is the computation of
    all gradients, and each orange bar is a message: with overlap, the link works while gradients are computed.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## The controller

    In a real training program, ranks finish their gradients in different orders. What happens if rank 0 submits layer 1 first and
    rank 1 submits layer 3 first?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    order = ask(
        {
            "a MismatchError, as in chapter 2": "error",
            "wrong sums: layer 1 is added to layer 3": "wrong",
            "right sums: the controller agrees on an order": "right",
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
    Predicted: {order.value}. Run: **{sums[0]}** on both ranks. A background thread on each rank collects the names that are ready; the ranks
    agree which names all of them have, and reduce those together. After some steps with the same order, they keep it without asking
    again.
    """)
    return


if __name__ == "__main__":
    app.run()
