"""Times of one layer on one device: its operators and its exchanges, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.constants.calibrated_constants import CalibratedConstants
from unisono.planner.inputs.lora import Lora, divided
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import EAGER, MEGATRON_CORE
from unisono.planner.step_times.exchange_times import ExchangeTimes, GroupPlace
from unisono.planner.step_times.kernel_times import KernelTimes

ROUTED_BYTES = 2
BACKWARD_ATTENTION = 3.1
"""Ratio of the backward to the forward time of fused attention: 2.5 times the FLOPs at 0.8 of the
rate (Dao, arXiv 2307.08691)."""
_FUSED_NORM, _EAGER_NORM = 8, 80
"""Bytes moved by the two norms per value of the residual stream: read and written in 16 bits, and
by the RMSNorm of PyTorch without torch.compile (until 2.8), which runs one kernel each to convert
to float32 (6 bytes), square (8), average (4), multiply with the root (8) and with the weight (8),
and convert back (6)."""
_EAGER_ROTARY = 16
"""Additional bytes per value of queries and keys to rotate them without torch.compile: float32
(6), product (8) and conversion back (6), instead of one read and write."""
_EAGER_SILU = 10
"""Bytes per value of a gated activation in two kernels, instead of one."""
_PAIR_COLUMNS, _KERNEL_POSITIONS = 40, 400
"""Work of fused attention beside its products: for each pair of positions, that of so many columns
of a head (exponentials, whose number does not depend on the width), and for each position, that of
so many others (blocks that lie partly above the diagonal, incomplete waves). On an H200, cuDNN has
55 and 250, and FlashAttention 2 has 19 and 390 (benchmarks/gpu_operators.py)."""
_USUAL_HEAD = 128
"""Columns of the heads for which rates of fused attention are stated."""
_MERGED_BYTES = 10
"""Bytes for each value of the output that each step of a ring adds to the result of the steps
before: one read in 16 bits, and one read and write in float32."""
_CLAMP_BYTES = 16
"""Bytes for each value of the inner width to limit both inputs of an activation, and to join them,
in kernels of their own: so does Megatron-Core for GPT-OSS, whose experts have biases."""
_BIAS_BYTES = 28
"""Bytes for each value to which experts add a bias: the product of bias and probability in float32
(4 written), the sum (6 read, 4 written), the concatenation over the experts (4 read, 4 written) and
the conversion to 16 bits (4 read, 2 written). Programs run them one by one (`_apply_bias` of
Megatron-Core and of NeMo AutoModel)."""
_EXPERT_PRODUCTS = ("experts in", "experts out")
_RESIDUAL, _RESIDUAL_WITH_DROPOUT = 12, 14
"""Bytes moved per value by the two residual sums, without and with a dropout mask."""


class Shape(NamedTuple):
    """Sizes that determine the times of a layer on one device."""

    tokens: float
    """Tokens of a microbatch on one device, before division by tensor parallelism."""
    batch: int
    seq: int
    tp: int
    cp: int
    ep: int
    sequence_parallel: bool
    software: str
    experts: bool
    dispatch_bytes: int = 2
    """Bytes of a value of a token that is sent to its experts."""


class OperatorTime(NamedTuple):
    """Times of one operator of a layer, and its FLOPs and bytes in the forward pass."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    flops: float
    nbytes: float


class LayerTimes(NamedTuple):
    """Seconds of one layer: device time without exchanges, exchanges of each kind, host time.

    `expert_wait_s` is the time in a forward pass in which the device waits because the host
    launches the products of the experts too slowly.
    """

    forward_s: float
    backward_s: float
    attention_s: float
    memory_s: float
    memory_backward_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    launches_s: float
    expert_wait_s: float

    def recomputed_s(self, recompute: str, software: str) -> float:
        """Returns the device time of the forward operators that the backward pass runs again."""
        if recompute == "none":
            return 0.0
        if recompute == "full":
            return self.forward_s
        if software in EAGER:
            return self.attention_s
        if software in MEGATRON_CORE:
            return self.memory_s
        products_s = self.forward_s - self.attention_s - self.memory_s
        return products_s / 2 + self.memory_s


class LayerModel:
    """Computes the times of a layer from its shape."""

    def __init__(
        self,
        model: Transformer,
        kernels: KernelTimes,
        exchanges: ExchangeTimes,
        constants: CalibratedConstants,
        lora: Lora | None = None,
        context: str = "ring",
    ) -> None:
        self._model, self._kernels, self._exchanges = model, kernels, exchanges
        self._constants, self._lora, self._context = constants, lora, context

    def times(self, shape: Shape) -> LayerTimes:
        """Returns the times of a layer."""
        operators = self.operators(shape)
        forward_s = sum(each[2] for each in operators)
        backward_s = sum(each[3] for each in operators)
        attention_s = sum(each[2] for each in operators if each[1] == "attention")
        memory_s = sum(each[2] for each in operators if each[1] == "memory")
        memory_backward_s = sum(each[3] for each in operators if each[1] == "memory")
        tensor_s, context_s, expert_s, collectives = self._exchange_s(shape)
        expert_launches_s = self._expert_launches_s(shape)
        launches_s = self._launches_s(shape, collectives) + expert_launches_s
        experts_s = sum(each[2] for each in operators if each[0] in _EXPERT_PRODUCTS)
        return LayerTimes(
            forward_s,
            backward_s,
            attention_s,
            memory_s,
            memory_backward_s,
            tensor_s,
            context_s,
            expert_s,
            launches_s,
            # The host launches the products while the tokens are sent and the products run.
            max(expert_launches_s - experts_s - expert_s / 2, 0.0),
        )

    def _launches_s(self, shape: Shape, collectives: int) -> float:
        """Returns the host seconds to launch the forward pass, except its routed experts."""
        constants = self._constants
        if shape.software == "megatron-2026":
            return 0.0  # One CUDA graph holds the whole step.
        if shape.software not in EAGER:
            return constants.launch_s
        pairs = shape.tp * (shape.tp - 1) / 2
        return constants.eager_launch_s + collectives * pairs * constants.pair_launch_s

    def _expert_launches_s(self, shape: Shape) -> float:
        """Returns the host seconds to launch the forward pass of a device's routed experts.

        Each expert's products are launched separately (Transformer Engine's GroupedLinear, which
        spreads them over streams).
        """
        if not shape.experts or shape.software == "megatron-2026":
            return 0.0
        return self._constants.expert_launch_s * self._model.experts / shape.ep

    def operators(self, shape: Shape) -> list[OperatorTime]:
        """Returns the operators of a layer on one device."""
        found = [*self._products(shape), self._attention(shape), *self._between(shape)]
        return found + (self._expert_operators(shape) if shape.experts else [])

    def _products(self, shape: Shape) -> list[OperatorTime]:
        model, tokens, tp = self._model, shape.tokens, shape.tp
        h, out = model.hidden, model.heads * model.head_dim / tp
        if model.kv_rank:
            query = self._query_products(shape)
        else:
            width = (model.query_width + _split_keys(model, tp) * tp) / tp
            query = [self._product("queries, keys and values", tokens, width, h)]
        found = [*query, self._product("attention output", tokens, h, out)]
        if model.gate_width:
            found.append(self._product("attention gates", tokens, model.gate_width / tp, h))
        if not shape.experts:
            inner = model.ffn / tp
            found.append(self._product("feed-forward in", tokens, (model.matrices - 1) * inner, h))
            found.append(self._product("feed-forward out", tokens, h, inner))
        return found

    def _query_products(self, shape: Shape) -> list[OperatorTime]:
        model, tokens, tp = self._model, shape.tokens, shape.tp
        h, heads = model.hidden, model.heads / tp
        down = model.query_rank + model.kv_rank + model.rope_dim
        found = [self._product("latent down", tokens, down, h)]
        rank = model.query_rank or h
        found.append(self._product("latent queries", tokens, model.query_width / tp, rank))
        keys = 2 * heads * model.head_dim
        return [*found, self._product("latent keys and values", tokens, keys, model.kv_rank)]

    def _product(self, name: str, rows: float, columns: float, inner: float) -> OperatorTime:
        forward_s, backward_s = self._kernels.all_products_s(rows, columns, inner)
        flops = 2 * rows * columns * inner
        return OperatorTime(name, "matmul", forward_s, backward_s, flops, 0)

    def _attention(self, shape: Shape) -> OperatorTime:
        model, kernels = self._model, self._kernels
        heads = model.heads / shape.tp
        width = model.head_dim * 2 + model.rope_dim
        flops = 2 * shape.tokens * shape.seq * width * heads
        if shape.software in EAGER:  # It computes all pairs, and masks those outside of windows.
            scores = shape.tokens * shape.seq * heads
            moved_s = scores * self._constants.score_traffic / kernels.memory_Bps
            flops_s = flops / kernels.wide_rate * (1 + self._constants.inner_loss / model.head_dim)
            forward_s = flops_s + moved_s
            moved = scores * self._constants.score_traffic
            return OperatorTime("attention", "attention", forward_s, 2 * forward_s, flops, moved)
        # Causal kernels skip half of the pairs, and those outside of windows.
        flops *= model.attended_share(shape.seq)
        forward_s = flops / 2 / kernels.attention_rate(shape.software)
        # Each step of a ring is a kernel for a part of the positions.
        steps = shape.cp if self._context == "ring" else 1
        forward_s *= 1 + steps * _KERNEL_POSITIONS / shape.seq
        columns = width / 2
        forward_s *= (1 + _PAIR_COLUMNS / columns) / (1 + _PAIR_COLUMNS / _USUAL_HEAD)
        backward_s = BACKWARD_ATTENTION * forward_s
        return OperatorTime("attention", "attention", forward_s, backward_s, flops / 2, 0)

    def _between(self, shape: Shape) -> list[OperatorTime]:
        model, tokens = self._model, shape.tokens
        stream = tokens / (shape.tp if shape.sequence_parallel else 1)
        residual = _RESIDUAL if model.gated else _RESIDUAL_WITH_DROPOUT
        # Models with gates have RMSNorm and rotary positions. GELU and LayerNorm are one kernel.
        eager = model.gated and shape.software == "torch-eager"
        norm = _EAGER_NORM if eager else _FUSED_NORM
        heads = 4 * (model.query_width + model.key_value_width)
        if eager:
            heads += _EAGER_ROTARY * (model.query_width + model.key_value_width // 2)
        found = [
            self._kernel("norms", stream * model.hidden * norm, 12 if eager else 2),
            self._kernel("residual sums", stream * model.hidden * residual, 2),
            self._kernel("layout of heads", tokens / shape.tp * heads, 14 if eager else 4),
        ]
        if not shape.experts:
            values = _activation_bytes(model, eager)
            nbytes = tokens / shape.tp * values * model.ffn
            found.append(self._kernel("activation", nbytes, 2 if eager else 1))
        if shape.cp > 1 and self._context == "ring":
            nbytes = shape.cp * _MERGED_BYTES * tokens / shape.tp * model.heads * model.head_dim
            found.append(self._kernel("ring sums", nbytes, shape.cp))
        if self._kernels.value_bytes < 2:
            found.append(self._kernel("conversion", self._converted_bytes(shape), 4))
        if self._lora is not None:
            found += self._adapters(self._lora, shape)
        return found

    def _adapters(self, lora: Lora, shape: Shape) -> list[OperatorTime]:
        """Returns the products of the adapters, which move bytes rather than compute. Forward
        reads the input, and adds the second product to the frozen one's output. Backward reads the
        output's gradient for two products, and the input, and adds to the input's gradient.
        """
        found = []
        for each in lora.adapters(self._model):
            inputs, outputs = divided(each, shape.tp)
            flops_s = 2 * shape.tokens * lora.rank * (inputs + outputs) / self._kernels.wide_rate
            forward = self._kernel("adapters", 2 * shape.tokens * (inputs + 2 * outputs), 2)
            backward = self._kernel("adapters", 2 * shape.tokens * (3 * inputs + 2 * outputs), 4)
            forward_s = forward.forward_s + flops_s
            backward_s = backward.forward_s + 2 * flops_s
            found.append(forward._replace(forward_s=forward_s, backward_s=backward_s))
        return found

    def _converted_bytes(self, shape: Shape) -> float:
        """Returns the bytes moved to convert values to 8 or 4 bits.

        For each value, two bytes are read, and the converted value is written twice: in the matrix
        and in its transpose. The values are the inputs of all products, also those of each expert.
        """
        model, tokens = self._model, shape.tokens
        values = model.hidden + model.heads * model.head_dim / shape.tp
        if not shape.experts or model.shared_experts:
            inner = model.shared_experts * model.expert_ffn if shape.experts else model.ffn
            values += model.hidden + inner / shape.tp
        if shape.experts:
            # Tokens are converted where their experts are, or once, before they are sent.
            copies = model.top_k if shape.dispatch_bytes > 1 else 1
            values += copies * model.hidden / (shape.tp if shape.ep > 1 else 1)
            values += model.top_k * model.expert_ffn / shape.tp
        return tokens * values * (2 + 2 * self._kernels.value_bytes)

    def _kernel(self, name: str, nbytes: float, count: int) -> OperatorTime:
        """Returns the time of `count` kernels that move `nbytes` together."""
        kernels = self._kernels
        forward_s = nbytes * self._constants.traffic / kernels.memory_Bps + count * kernels.start_s
        return OperatorTime(name, "memory", forward_s, 2 * forward_s, 0, nbytes)

    def _expert_operators(self, shape: Shape) -> list[OperatorTime]:
        model, kernels = self._model, self._kernels
        tokens = shape.tokens / (shape.tp if shape.ep > 1 else 1)
        split = shape.tp if shape.ep == 1 else 1
        local = model.experts / shape.ep
        rows = tokens * model.top_k / local
        inner, h = model.expert_ffn / split, model.hidden
        # n products of a device have n - 1 gaps; one product is as fast as a dense one.
        share = 1 / (1 + (1 / kernels.expert_share - 1) * (1 - 1 / local))
        into = kernels.all_products_s(rows, (model.matrices - 1) * inner, h, local, share)
        out = kernels.all_products_s(rows, h, inner, local, share)
        moved = tokens * model.top_k * h * self._constants.expert_traffic
        ordered_s = moved / kernels.memory_Bps
        flops = 2 * tokens * model.top_k * h * inner
        values = _activation_bytes(model, shape.software == "torch-eager")
        found = [
            OperatorTime("experts in", "matmul", *into, (model.matrices - 1) * flops, 0),
            OperatorTime("experts out", "matmul", *out, flops, 0),
            self._kernel("expert activation", tokens * model.top_k * values * inner, 1),
            OperatorTime("order by expert", "memory", ordered_s, ordered_s, 0, moved),
        ]
        if model.expert_vectors and shape.software != "megatron-2026":
            clamped = _CLAMP_BYTES if shape.software in MEGATRON_CORE else 0
            nbytes = tokens * model.top_k * (h * _BIAS_BYTES + inner * clamped)
            found.append(self._kernel("expert biases", nbytes, 5))
        if model.shared_experts:
            width = model.shared_experts * model.expert_ffn / shape.tp
            found += [
                self._product("shared experts in", shape.tokens, (model.matrices - 1) * width, h),
                self._product("shared experts out", shape.tokens, h, width),
            ]
        return found

    def _exchange_s(self, shape: Shape) -> tuple[float, float, float, int]:
        """Returns the seconds of the tensor, of the context and of the expert exchanges in the
        forward pass, and their number.
        """
        model, exchanges, count = self._model, self._exchanges, 0
        tensor_s = context_s = expert_s = 0.0
        if shape.tp > 1:
            nbytes = shape.tokens * model.hidden * ROUTED_BYTES
            blocks = 1 if shape.experts and shape.ep > 1 else 2
            tensor_s = blocks * exchanges.all_reduce_s(nbytes, exchanges.place(shape.tp, 1))
            count += blocks
        if shape.cp > 1:
            place = exchanges.place(shape.cp, shape.tp)
            if self._context == "ulysses":
                context_s = self._heads_s(shape, place)
            else:
                nbytes = shape.tokens * _split_keys(model, shape.tp) * ROUTED_BYTES * shape.cp
                context_s = exchanges.gather_s(nbytes, place)
            count += 1
        if shape.experts and shape.ep > 1:
            expert_s = self._routes_s(shape)
            count += 2
        return tensor_s, context_s, expert_s, count

    def _heads_s(self, shape: Shape, place: GroupPlace) -> float:
        """Returns the seconds in which queries, keys and values are exchanged for all positions of
        some heads, and the outputs back. Key-value heads that are fewer than ranks are repeated.
        """
        model = self._model
        heads = max(model.kv_heads, shape.tp * shape.cp)
        widths = model.query_width + model.heads * model.head_dim
        widths += model.key_value_width * heads // model.kv_heads
        nbytes = shape.tokens * widths / shape.tp * ROUTED_BYTES * (shape.cp - 1) / shape.cp
        # Four exchanges: each has its own start.
        return self._exchanges.all_to_all_s(nbytes, place) + 3 * self._exchanges.start_s(place)

    def _routes_s(self, shape: Shape) -> float:
        """Returns the seconds in which tokens go to their experts, and their outputs come back."""
        model, exchanges = self._model, self._exchanges
        values = shape.tokens / shape.tp * model.hidden
        place, found = exchanges.place(shape.ep, 1), 0.0
        groups, limit = max(model.expert_groups, 1), max(model.token_groups, 1)
        for nbytes in (shape.dispatch_bytes, ROUTED_BYTES):
            found += exchanges.route_s(
                values * nbytes, model.top_k, place, groups=groups, limit=limit
            )
        return found


def _activation_bytes(model: Transformer, eager: bool) -> int:
    """Returns the bytes moved per value of the inner width by the activation function."""
    if not model.gated:
        return 4
    return _EAGER_SILU if eager else 6


def _split_keys(model: Transformer, tp: int) -> float:
    """Returns the width of keys and values on one tensor-parallel rank.

    If there are fewer heads than ranks, heads are repeated.
    """
    if model.kv_rank:
        return model.key_value_width / tp
    return 2 * model.head_dim * max(model.kv_heads / tp, 1)
