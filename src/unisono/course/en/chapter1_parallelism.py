"""Why a model needs communication: a lab of the course (`unisono learn parallelism`)."""

import marimo

app = marimo.App(app_title="Why a model needs communication")


@app.cell(hide_code=True)
def _():
    import marimo as mo

    from unisono.course import ask, wait_for

    return ask, mo, wait_for


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # 1. Why a model needs communication

    Training a large model on one device fails for two reasons: the model does not fit, or the data take years. So the work is
    divided among **ranks**, and the ranks must exchange what the others computed. Four ways to divide, four things to exchange. In
    this lab each of them runs on four real processes, and must give the result of one process.
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
    ## Data parallelism

    Each rank has the whole model and a quarter of the batch. After the backward pass, each rank has gradients of its own samples.

    Suppose that the ranks do **not** communicate. All begin with the same weights. After ten steps, do they still have the same
    weights?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    same = ask(
        {
            "yes, all began with the same weights": True,
            "no, each follows its own samples": False,
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
    Predicted the same weights: {same.value}. Run: without communication, the weights of two ranks differ by up to
    {distance["without communication"]:.2f}. With `average_gradients`, all ranks have equal bits, and differ from one process with the
    whole batch by {distance["average_gradients, to one process"]:.0e}, from rounding.

    The mean of the ranks' gradients **is** the gradient of the whole batch. So one all-reduce per step makes four models one.
    `examples/average_gradients.py` is the same with torch and real digits.
    """)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Tensor, pipeline and expert parallelism

    If the model does not fit, its weights are divided, too.

    - **Tensor parallelism**: each rank has some columns (or rows) of each matrix.
    - **Pipeline parallelism**: each rank has some layers, and sends the activations to the next rank.
    - **Expert parallelism**: each rank has one expert, and each token travels to the rank of its expert.

    A matrix A is divided by columns and the next one, B, by rows. To compute x A B, each rank computes x A_r B_r. Which collective
    makes the result of these four products?
    """)
    return


@app.cell(hide_code=True)
def _(ask):
    combines = ask(
        {
            "all_gather: put the parts side by side": "all_gather",
            "all_reduce: add the parts": "all_reduce",
            "all_to_all: exchange the parts": "all_to_all",
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
    Predicted: `{combines.value}`. It is **`all_reduce`**: x A B is the sum of the four products x A_r B_r. The largest differences to one
    process: tensor {largest["tensor"]:.0e}, pipeline {largest["pipeline"]:.0e}, expert {largest["expert"]:.0e}.

    | division | each rank has | exchange in each step |
    |---|---|---|
    | data | all weights, a part of the batch | all_reduce of the gradients |
    | tensor | a part of each matrix | all_reduce of activations, twice per layer |
    | pipeline | some layers | send and receive of activations between neighbours |
    | expert | some experts | all_to_all of tokens, there and back |
    """)
    return


if __name__ == "__main__":
    app.run()
