"""A stream of samples without indices, split over ranks and loader workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, first, step):
        self.first, self.step, self.epoch = first, step, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(512, generator=generator)
        for number in order[self.first :: self.step]:
            yield torch.sin(number * torch.arange(1, 9)), number % 4


dist.init_process_group("gloo")
data = Stream(dist.get_rank(), dist.get_world_size())
loader = DataLoader(data, 16, drop_last=True)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    data.epoch = epoch
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
