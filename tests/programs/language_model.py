"""A language model with tied weights. Batches are cut from one tensor, without a loader."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.block(self.embed(tokens), mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(text, size, length):
    starts = torch.randint(len(text) - length, (size,)).tolist()
    tokens = torch.stack([text[start : start + length] for start in starts])
    targets = torch.stack([text[start + 1 : start + length + 1] for start in starts])
    return tokens, targets


dist.init_process_group("gloo")
torch.manual_seed(0)
text = torch.randint(50, (20_000,))
model = DistributedDataParallel(Model(50, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1337 + dist.get_rank())
for _ in range(1_000):
    loss = model(*get_batch(text, 8, 12))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
dist.destroy_process_group()
