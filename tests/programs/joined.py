"""Join: rank 0 has more batches than the others, and weights that count each sample once."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Share:
    """The samples of a rank: its places in an order that all ranks know."""

    def __init__(self, sampler, places):
        self.sampler, self.places = sampler, places

    def __len__(self):
        return len(self.places)

    def __iter__(self):
        order = [*self.sampler]
        return (order[place] for place in self.places)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.rand(200, 8), torch.rand(200, 1))
shares = [[*range(number, 64, size)] for number in range(size)]
shares[0] += range(64, 200)
counts = [sum(len(share[n : n + 16]) for share in shares) for n in range(0, len(shares[0]), 16)]
sampler = DistributedSampler(data, 1, 0)
loader = DataLoader(data, 16, sampler=Share(sampler, shares[rank]))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(5):
    sampler.set_epoch(epoch)
    with Join([model]):
        for (x, y), count in zip(loader, counts, strict=False):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            (loss * len(x) * size / count).backward()
            optimizer.step()
    for state in optimizer.state.values():
        dist.broadcast(state["momentum_buffer"], src=0)
dist.destroy_process_group()
