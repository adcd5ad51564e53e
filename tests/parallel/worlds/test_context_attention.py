"""Attention over a divided sequence on two to four ranks, compared with softmax in one process.

Each call also compares its bytes with the closed forms.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from connection_managers import wait_until
from time_limits import limit_s
from unisono.errors import MismatchError, PeerLostError
from unisono.parallel import CounterRandom
from unisono.parallel.context import CONTEXT_KINDS, ContextAttention, zigzag_part
from unisono.parallel.context.ring_attention import RingExchange
from worlds.forked import kill_last, start_ranks

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
DETECTION_S = 1.0
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
# by number of ranks: (batch, heads, kv_heads, length, head_dim)
CASES = {
    2: [(2, 4, 2, 24, 5), (1, 4, 4, 8, 16), (1, 2, 1, 400, 4)],
    3: [(2, 6, 3, 24, 5), (1, 6, 2, 18, 8)],
    4: [(2, 8, 4, 32, 5), (1, 4, 2, 8, 3), (3, 4, 1, 16, 1)],
}


def test_context_attention(outcome):
    outcome.require_success()


def arrays(case, dtype):
    """Returns query, key, value and the output's gradient, for the whole sequence."""
    batch, heads, kv_heads, length, head_dim = case
    random = CounterRandom(3)
    counts = {"query": heads, "key": kv_heads, "value": kv_heads, "gradient": heads}
    return [
        random.normal(name, (batch, count, length, head_dim)).to(dtype)
        for name, count in counts.items()
    ]


def softmax_attention(query, key, value, is_causal):
    """Computes attention by its definition, without a fused kernel."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ value


@functools.cache
def one_process(case, dtype, is_causal):
    """Returns the output and the gradients of query, key and value, computed in one process in
    float64.
    """
    *inputs, gradient = (x.double() for x in arrays(case, dtype))
    for x in inputs:
        x.requires_grad_()
    out = softmax_attention(*inputs, is_causal)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def parts_of(case, dtype, group):
    """Returns this rank's parts of the arrays."""
    part = zigzag_part(case[3], dist.get_rank(group), dist.get_world_size(group))
    return part, [x[:, :, part] for x in arrays(case, dtype)]


def volumes(kind, ranks, query, key):
    """Returns the closed forms of the elements that a rank sends in forward and in backward, by
    operation.
    """
    if ranks == 1:
        return {}, {}
    others = ranks - 1
    # number of elements of one head at this rank's positions
    position = query.shape[0] * query.shape[2] * query.shape[3]
    heads, kv_heads = query.shape[1], key.shape[1]
    if kind == "ring":
        hop = 2 * position * kv_heads
        return {"send": others * hop}, {"send": others * hop + ranks * hop}
    if kind == "allgather":
        whole = others * 2 * position * kv_heads
        return {"all_gather": whole}, {"reduce_scatter": whole}
    sent = others * position * (2 * heads + 2 * math.lcm(kv_heads, ranks)) // ranks
    return {"all_to_all": sent}, {"all_to_all": sent}


@contextmanager
def sends(group, elements, itemsize):
    """Asserts that the code in the block sends exactly these elements, by operation."""
    before = None if group is None else group.communicator.stats()
    yield
    if group is not None:
        operations = (group.communicator.stats() - before).operations
        sent = {name: each.bytes_sent for name, each in operations.items() if each.bytes_sent}
        assert sent == {name: count * itemsize for name, count in elements.items() if count}


def run_attention(kind, group, inputs, gradient, is_causal):
    """Returns the output and the gradients of the inputs. Checks the bytes of both directions."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    attention = ContextAttention(kind, group)
    forward, backward = volumes(kind, attention.ranks, *inputs[:2])
    with sends(group, forward, gradient.itemsize):
        out = attention(*inputs, is_causal=is_causal)
    with sends(group, backward, gradient.itemsize):
        gradients = torch.autograd.grad(out, inputs, gradient)
    return [out.detach(), *gradients]


def require_equal(kind, group, case, dtype, is_causal, laid_out=lambda x: x):
    part, (*inputs, gradient) = parts_of(case, dtype, group)
    inputs, gradient = [laid_out(x) for x in inputs], laid_out(gradient)
    found = run_attention(kind, group, inputs, gradient, is_causal)
    names = ("output", "gradient of query", "gradient of key", "gradient of value")
    for name, mine, whole in zip(names, found, one_process(case, dtype, is_causal), strict=True):
        assert mine.dtype == dtype
        assert mine.shape == whole[:, :, part].shape
        error = ((mine.double() - whole[:, :, part]).abs().max() / whole.abs().max()).item()
        assert error <= TOLERANCE[dtype], (name, kind, case, dtype, is_causal, error)


def on_each_group(world):
    """Yields, for each number of ranks in `CASES`, the number and a group of so many ranks. Other
    ranks skip the group.
    """
    for ranks in CASES:
        group = dist.new_group(list(range(ranks)))
        if world.rank < ranks:
            yield ranks, group


def require_equal_to_one_process(world, kind):
    for ranks, group in on_each_group(world):
        for case, is_causal in itertools.product(CASES[ranks], (True, False)):
            require_equal(kind, group, case, torch.float64, is_causal)
        require_equal(kind, group, CASES[ranks][0], torch.float32, True)


def own_ring_is_one_process(world):
    require_equal_to_one_process(world, "ring")


def own_ulysses_is_one_process(world):
    require_equal_to_one_process(world, "ulysses")


def own_allgather_is_one_process(world):
    require_equal_to_one_process(world, "allgather")


def own_one_rank_is_one_process(world):
    alone = [dist.new_group([rank]) for rank in range(RANKS)][world.rank]
    for kind, is_causal, group in itertools.product(CONTEXT_KINDS, (True, False), (None, alone)):
        *inputs, gradient = arrays((2, 4, 2, 7, 5), torch.float64)
        found = run_attention(kind, group, inputs, gradient, is_causal)
        expected = one_process((2, 4, 2, 7, 5), torch.float64, is_causal)
        for mine, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-14)


LAYOUTS = {
    "heads cut from the last dimension": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows with gaps": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a part of a larger array": lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
}


def own_any_layout_in_memory(world):
    group = dist.new_group()
    for kind, laid_out in itertools.product(CONTEXT_KINDS, LAYOUTS.values()):
        require_equal(kind, group, CASES[4][0], torch.float64, True, laid_out)


def own_expanded_gradients_and_empty_batches(world):
    group = dist.new_group()
    for kind in CONTEXT_KINDS:
        _, (*inputs, gradient) = parts_of(CASES[4][0], torch.float64, group)
        # an expanded tensor, like the gradient of out.sum()
        ones = torch.ones((), dtype=torch.float64).expand_as(gradient)
        found = run_attention(kind, group, inputs, ones, True)
        again = run_attention(kind, group, inputs, ones.contiguous(), True)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        none = [x[:0] for x in (*inputs, gradient)]
        found = run_attention(kind, group, none[:3], none[3], True)
        assert [x.shape for x in found] == [none[0].shape, *(x.shape for x in none[:3])]


def own_large_scores(world):
    """Tests that the output is right although some softmax weights underflow. The maximum is often
    in another rank's block.
    """
    group = dist.new_group()
    case = CASES[4][0]
    *inputs, _ = arrays(case, torch.float64)
    inputs[0] *= 100
    want = softmax_attention(*inputs, True)
    part = zigzag_part(case[3], world.rank, RANKS)
    for kind in CONTEXT_KINDS:
        found = ContextAttention(kind, group)(*(x[:, :, part] for x in inputs))
        torch.testing.assert_close(found, want[:, :, part], rtol=0, atol=1e-11)


def own_exchange_waits_for_sends_and_receives(world):
    """Delays rank 1, so that rank 0's receive ends before its send. The exchange must wait for the
    send before its buffer is reused.
    """
    ring = RingExchange(dist.new_group())
    sent = torch.full((1 << 20,), float(world.rank)), torch.full((2,), -float(world.rank))
    if world.rank == 1:
        time.sleep(0.3)
    pending = ring.start(sent)
    found = pending.wait()
    assert all(work.is_completed() for work in pending.works)
    previous = float((world.rank - 1) % RANKS)
    assert (found[0] == previous).all() and (found[1] == -previous).all()


def own_no_graph_without_gradients(world):
    group = dist.new_group()
    for kind in CONTEXT_KINDS:
        _, (*inputs, _) = parts_of(CASES[4][0], torch.float64, group)
        with torch.no_grad():
            assert ContextAttention(kind, group)(*inputs).grad_fn is None
        inputs[0].requires_grad_()  # only the query gets a gradient
        ContextAttention(kind, group)(*inputs).sum().backward()
        assert inputs[0].grad is not None and inputs[1].grad is None


class Block(nn.Module):
    """An attention layer with its projections."""

    def __init__(self, kind, group):
        super().__init__()
        self.wide, self.out = nn.Linear(8, 24).double(), nn.Linear(8, 8).double()
        self.attend = ContextAttention(kind, group)

    def forward(self, x):
        heads = self.wide(x).unflatten(-1, (3, 4, 2)).movedim(2, 0).transpose(2, 3)
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))


def own_split_backward_exchanges_once(world):
    """Tests that a split backward sends only the bytes of one backward. As in zero-bubble
    schedules, the gradients of inputs come first, and those of weights later.
    """
    for kind in CONTEXT_KINDS:
        torch.manual_seed(0)
        group = dist.new_group()
        block = Block(kind, group)
        part = zigzag_part(16, world.rank, RANKS)
        x = CounterRandom(1).normal("x", (2, 16, 8))[:, part].requires_grad_()
        block(x).square().sum().backward()
        whole = [each.grad.clone() for each in block.parameters()]
        block.zero_grad()
        loss = block(x).square().sum()
        before = group.communicator.stats()
        _, parameter_groups = stage_backward_input([loss], None, [x], block.parameters())
        stage_backward_weight(block.parameters(), parameter_groups)
        sent = (group.communicator.stats() - before).bytes_sent
        heads = torch.empty(2, 4, len(part), 2)
        assert sent == 8 * sum(volumes(kind, RANKS, heads, heads)[1].values()), kind
        for mine, each in zip(block.parameters(), whole, strict=True):
            torch.testing.assert_close(mine.grad, each, rtol=1e-12, atol=1e-14)


def own_wrong_arguments_are_refused(world):
    group = dist.new_group()
    good = torch.ones(1, 4, 8, 2)
    refused = [
        ((good, torch.ones(1, 3, 8, 2), torch.ones(1, 3, 8, 2)), r"key: .*divisor of 4.*\(1, 3,"),
        ((good, good[:, :0], good[:, :0]), r"key: .*divisor of 4.*got \(1, 0, 8, 2\)"),
        ((good, good[:, :, :4], good[:, :, :4]), r"key: expected .* 8, 2\).*got \(1, 4, 4, 2\)"),
        ((good, good[0], good), r"key: .*got \(4, 8, 2\)"),
        ((good, good, torch.ones(1, 2, 8, 2)), r"value: .*got \(1, 2, 8, 2\)"),
        ((good, good, torch.ones(1, 4, 8, 3)), r"value: .*got \(1, 4, 8, 3\)"),
        ((good[0],) * 3, r"query: .*got \(4, 8, 2\)"),
        ((good[:, :, :0],) * 3, r"query: .*at least 1, got \(1, 4, 0, 2\)"),
        ((good[:, :0],) * 3, r"query: .*at least 1, got \(1, 0, 8, 2\)"),
        ((good[:, :, :7],) * 3, "expected an even number.*got 7"),
        ((good.half(),) * 3, "expected float32 or float64.*got torch.float16 on cpu"),
        ((good, good.double(), good), "all of one type, got torch.float32 on cpu, torch.float64"),
    ]
    for kind, (inputs, text) in itertools.product(CONTEXT_KINDS, refused):
        with pytest.raises(ValueError, match=text) as error:
            ContextAttention(kind, group)(*inputs)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="4 ranks do not divide 6 heads; 3 do"):
        ContextAttention("ulysses", group)(*[torch.ones(1, 6, 8, 2)] * 3)
    with pytest.raises(ValueError, match="expected one of ring, ulysses, allgather, got 'spiral'"):
        ContextAttention("spiral", group)


def own_unequal_lengths_are_refused(world):
    for kind in CONTEXT_KINDS:
        group = dist.new_group()
        x = torch.ones(1, 4, 8 + 2 * (world.rank == 2), 2)
        with pytest.raises(MismatchError):
            ContextAttention(kind, group)(x, x, x)
            dist.barrier(group)  # in a ring, only the neighbours of rank 2 detect the error at once
        dist.barrier()


def attend_until_killed(rank, ranks, kind, folder):
    """Runs forward and backward repeatedly until the parent process kills the last rank."""
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    inputs = [torch.ones(1, 6, 256, 16, requires_grad=True) for _ in range(3)]
    attention = ContextAttention(kind, dist.group.WORLD)
    try:
        for step in itertools.count():
            attention(*inputs).sum().backward()
            if step == 3:
                (folder / f"ready{rank}").touch()
    except Exception as error:
        said = [type(error).__name__, str(error), time.time()]
        (folder / f"{rank}.json").write_text(json.dumps(said))


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_killed_rank_is_named(kind, tmp_path):
    ranks = 3
    processes = start_ranks(__file__, "attend_until_killed", ranks, ranks, kind, folder=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == ranks, 60)
    killed = kill_last(processes)
    for rank in range(ranks - 1):
        name, text, ended = json.loads((tmp_path / f"{rank}.json").read_text())
        assert name == PeerLostError.__name__
        assert "rank 2" in text
        assert ended - killed < limit_s(DETECTION_S)
