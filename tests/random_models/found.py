"""Small cases of each kind of fault that random cases have found, by what is wrong."""

from __future__ import annotations

from random_models.case import Case

_DP = {"layout": "dp=2", "microbatches": 2}
_ZERO = {"layout": "dp=2,zero=3", "microbatches": 2}
_PP = {"layout": "pp=2", "microbatches": 2}
_TRACED = {"layout": "pp=2", "microbatches": 2, "example": True}
_SP = {"layout": "tp=2,sequence_parallel=1"}
_DECODER = {"container": "decoder", "inputs": "tokens", "width": 4, "loss": "flat"}
_GRID = _DECODER | {"layout": "tp=4,tensor=2d", "loss": "decoder_cross_entropy"}
_CP = _DECODER | {"layout": "cp=2"}

FOUND: dict[str, Case] = {
    # pipelines
    "module twice in a sequence": Case(**_PP, blocks=("shared",)),
    "module twice in a traced sequence": Case(**_TRACED, blocks=("shared",)),
    "reentrant checkpoint in a pipeline": Case(
        **_PP, blocks=("linear_pair", "checkpoint_reentrant", "tanh")
    ),
    "buffer in a pipeline": Case(**_PP, blocks=("linear", "running_mean")),
    "counter in a pipeline": Case(**_PP, blocks=("linear", "counter")),
    "buffer not saved, resumed elsewhere": Case(
        **_TRACED,
        container="chain",
        blocks=("constant_not_saved", "linear"),
        resumed="dp=2",
        batches=((8, 4),) * 4,
    ),
    # modules that see a part of the positions or of the width
    "norm between divided positions": Case(**_SP, **_DECODER, blocks=("layer_norm",)),
    "linear between divided positions": Case(**_SP, **_DECODER, blocks=("linear",)),
    "convolution between divided positions": Case(**_SP, **_DECODER, blocks=("conv",)),
    "convolution with cp": Case(**_CP, blocks=("conv",)),
    "recurrence with cp": Case(**_CP, blocks=("gru",)),
    "torch's attention with cp": Case(**_CP, blocks=("torch_attention",)),
    "causal mask with cp": Case(**_CP, blocks=("causal_mask",)),
    "positions with cp": Case(**_CP, blocks=("positions",)),
    "group norm with cp": Case(**_CP, blocks=("group_norm",)),
    "norm with 2d": Case(**_GRID, blocks=("layer_norm",)),
    "linear with 2d": Case(**_GRID, blocks=("linear",)),
    "buffer with 2d": Case(**_GRID, blocks=("constant",)),
    "sequence_parallel without a decoder": Case(**_SP, blocks=("linear_pair",)),
    "sequence_parallel and attention alone": Case(**_SP, blocks=("attention",), width=4),
    "sequence_parallel without positions": Case(**_SP, inputs="vectors", blocks=("linear_pair",)),
    "layout dropout behind images": Case(inputs="images", blocks=("layout_dropout",)),
    # buffers that forward passes change
    "running statistics of an instance norm": Case(**_DP, blocks=("tracking_instance_norm",)),
    "running mean": Case(**_DP, blocks=("running_mean",)),
    "observer": Case(**_DP, blocks=("observer",)),
    "counter": Case(**_DP, blocks=("counter",)),
    "spectral norm": Case(**_DP, blocks=("spectral_norm",)),
    # parameters and hooks
    "hook that is not linear": Case(layout="dp=2", blocks=("gradient_clamp",)),
    "hook that is not linear, in a pipeline": Case(**_PP, blocks=("gradient_clamp", "linear")),
    "hook that is not linear, with ignored targets": Case(
        layout="dp=2", blocks=("gradient_clamp", "tanh"), loss="flat", ignored="half"
    ),
    "hook after accumulation": Case(**_DP, blocks=("after_gradient",)),
    "gradient hook with zero": Case(**_ZERO, blocks=("gradient_mask",)),
    "gradient hook with tp": Case(layout="tp=2", blocks=("gradient_mask_in_pair",)),
    "forward hook in a pair with tp": Case(layout="tp=2", blocks=("hook_after",)),
    "lazy parameters": Case(**_DP, blocks=("lazy",)),
    "complex parameters": Case(**_DP, blocks=("complex",)),
    "complex parameters in a pipeline": Case(**_PP, blocks=("linear", "complex")),
    "empty parameter with zero": Case(**_ZERO, blocks=("empty",)),
    "sparse gradients with zero": Case(**_ZERO, blocks=("sparse",)),
    "pruned linear with tp": Case(layout="tp=2", blocks=("linear_pair", "pruned")),
    "old spectral norm with tp": Case(layout="tp=2", blocks=("linear_pair", "old_spectral_norm")),
    "in place with zero": Case(**_ZERO, blocks=("relu_in_place",)),
    "lookup with max_norm": Case(**_DP, blocks=("linear_pair", "max_norm", "tanh")),
    "lookup that scales by frequency": Case(**_DP, blocks=("scale_by_frequency",)),
    "optimizer that uses a parameter's size, with tp": Case(
        layout="tp=2", blocks=("linear_pair",), optimizer="own"
    ),
    # losses and batches
    "function that ignores a class": Case(**_DP, loss="flat_pad", ignored="some"),
    "sum": Case(**_DP, loss="flat_sum"),
    "sum without ignored targets": Case(**_DP, loss="written_sum"),
    "root of a mean": Case(**_DP, loss="root"),
    "class weights": Case(**_DP, loss="flat_weights"),
    "shifted labels": Case(**_DP, loss="shifted", ignored="some"),
    "mask": Case(**_DP, loss="mask_mean", ignored="some"),
    "mean over samples": Case(**_DP, loss="samples_mean", ignored="some"),
    "loss that counts": Case(**_DP, loss="counting"),
    "loss that counts its parts": Case(**_DP, loss="counting_pairs"),
    "loss that returns no scalar, in a pipeline": Case(**_PP, loss="vector"),
    "loss that returns a number, in a pipeline": Case(**_PP, loss="plain_number"),
    "infinite logits in a part without targets": Case(**_DP, head="masked", ignored="half"),
    "tuple in a part without targets": Case(**_DP, container="tuple_result", ignored="half"),
    "dictionary in a part without targets": Case(**_DP, container="dict_result", ignored="half"),
    "tuple from a pipeline": Case(**_PP, container="tuple_result"),
    "no valid target at all": Case(layout="dp=2", ignored="sample", batches=((1, 4),)),
    "autocast with zero": Case(**_ZERO, autocast=True),
    "autocast with 2d": Case(**_GRID, autocast=True),
    "rank without samples": Case(
        layout="dp=4", blocks=("instance_norm", "experts"), batches=((3, 4), (3, 4))
    ),
    "experts behind images": Case(layout="dp=2", inputs="images", blocks=("experts",)),
    "parameter used twice with a split backward": Case(
        layout="pp=2,schedule=zb1p",
        inputs="images",
        width=8,
        blocks=("tied_apart", "tanh"),
        batches=((8, 8), (8, 8)),
        microbatches=2,
    ),
    "pairs of layers whose parts differ, in a pipeline": Case(
        layout="tp=2,pp=2",
        inputs="tokens",
        width=4,
        blocks=("linear_pair", "linear_pair"),
        batches=((8, 8), (8, 8)),
        microbatches=2,
    ),
    "module twice in a traced model": Case(**_TRACED, container="chain", blocks=("shared",)),
    "result that its own graph needs, with a split backward": Case(
        layout="pp=2,schedule=zbv,vpp=2",
        inputs="vectors",
        width=5,
        blocks=("layer_norm", "nested_results"),
        head="masked",
        loss="flat",
        autocast=True,
        microbatches=2,
    ),
    "spectral norm in eval mode": Case(layout="dp=2", blocks=("old_spectral_norm",), habit="eval"),
    "checkpoint called twice with a split backward": Case(
        layout="pp=2,schedule=zbv,vpp=2",
        blocks=("checkpoint_twice", "residual_mlp"),
        microbatches=4,
    ),
    "collectives in a traced model with several results": Case(
        layout="tp=2,pp=2",
        container="dict_result",
        blocks=("mlp", "tanh"),
        microbatches=2,
        example=True,
    ),
    # checkpoints
    "resumed loss that counts": Case(resumed="zero=2", loss="counting", batches=((8, 4),) * 4),
    "resumed loss whose module counts": Case(
        resumed="zero=2", loss="counting", container="tuple_result", batches=((8, 4),) * 4
    ),
    "resumed without elements on a rank": Case(
        layout="tp=4", resumed="tp=4", blocks=("linear_pair",)
    ),
    "tied parameter of two stages of a rank, with zero": Case(
        layout="dp=2,pp=2,zero=2,schedule=zbv,vpp=2",
        microbatches=2,
        blocks=("mlp", "mlp"),
        **_DECODER,
    ),
    # programs
    "parameters collected before": Case(**_ZERO, habit="collect_first"),
    "parameters of the loss": Case(**_DP, loss="tempered", habit="train_loss"),
    "own part of the batch": Case(**_DP, habit="own_part"),
    "other batch on one rank": Case(**_DP, habit="other_batch"),
    "bad batch on one rank": Case(**_DP, habit="missing_target"),
    "lists instead of tensors": Case(**_DP, habit="listed_inputs"),
    "no targets": Case(**_DP, habit="no_targets"),
}
