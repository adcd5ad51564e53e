"""torchtune trains a small Llama 3 with its parts of a recipe: weights of rank 0, FSDP2, loss.

A recipe itself (`tune run`) needs a tokenizer and weights from a hub.
"""

from __future__ import annotations

import torch
from digits_task import BATCH, STEPS, Record
from torch import distributed as dist
from torchtune import training
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

TOKENS, LENGTH = 64, 32

dist.init_process_group(training.get_distributed_backend("cpu"))
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = llama3(
    vocab_size=TOKENS, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=128, max_seq_len=LENGTH
)
weights = model.state_dict()
training.shard_model(model, [lambda name, _: name in ("layers.0", "layers.1")], cpu_offload=False)
training.load_from_full_model_state_dict(model, weights, torch.device("cpu"), strict=True)
training.validate_no_params_on_meta_device(model)
loss_of = CEWithChunkedOutputLoss(num_output_chunks=2)
model.set_num_output_chunks(loss_of.num_output_chunks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
record = Record()
for step in range(STEPS):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(0, TOKENS, (BATCH // 4, 1), generator=generator)
    texts = (starts + torch.arange(LENGTH + 1) * 3) % TOKENS
    loss = loss_of(model(texts[:, :-1]), texts[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    record.step(loss.item())
full = training.gather_cpu_state_dict(model, is_rank_zero=rank == 0, device=torch.device("cpu"))
assert rank or full.keys() == weights.keys()
record.report()
dist.destroy_process_group()
