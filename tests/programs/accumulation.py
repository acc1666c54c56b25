"""Gradient accumulation: three micro-batches per step, with clipped gradients."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(240, 8), torch.rand(240, 1))
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
ACCUMULATE = 3
for epoch in range(5):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader, start=1):
        last = number % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
            loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
