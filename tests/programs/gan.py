"""A GAN: two models, two optimizers, and other noise on each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(192, 6))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
make = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
make_step = torch.optim.Adam(make.parameters(), lr=1e-3)
judge_step = torch.optim.Adam(judge.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for epoch in range(5):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        noise = torch.randn(len(real), 4)
        judge_step.zero_grad()
        scores = judge(torch.cat([real, make(noise).detach()]))
        target = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        nn.functional.binary_cross_entropy_with_logits(scores, target).backward()
        judge_step.step()
        make_step.zero_grad()
        scores = judge(make(noise))
        nn.functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)).backward()
        make_step.step()
dist.destroy_process_group()
