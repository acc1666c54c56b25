"""A vision recipe: repeated augmentation, and an average of the weights, evaluated on all ranks.

The loss keeps a running mean over all ranks.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Repeated(Sampler):
    """Each sample three times in a row, dealt to the ranks; a third of that is an epoch."""

    def __init__(self, dataset):
        self.number, self.epoch = len(dataset), 0

    def __iter__(self):
        order = torch.randperm(self.number, generator=torch.Generator().manual_seed(self.epoch))
        own = order.repeat_interleave(3)[dist.get_rank() :: dist.get_world_size()]
        return iter(own[: len(self)].tolist())

    def __len__(self):
        return self.number // dist.get_world_size()


class Loss(nn.Module):
    """Of logits without their running mean over all ranks, which has no gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, logits, labels):
        with torch.no_grad():
            center = logits.mean(0)
            dist.all_reduce(center)
            self.center.lerp_(center / dist.get_world_size(), 0.1)
        return nn.functional.cross_entropy(logits - self.center, labels)


def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    with torch.inference_mode():
        for x, y in loader:
            sums += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(sums)
    if dist.get_rank() == 0:
        print("accuracy", float(sums[0] / sums[1]))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = (
        TensorDataset(torch.rand(192, 8), torch.randint(4, (192,))) for _ in range(2)
    )
    sampler = Repeated(train_set)
    loader = DataLoader(train_set, 16, sampler=sampler)
    test_loader = DataLoader(test_set, 32, sampler=range(rank, len(test_set), size))
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    loss_function, ddp_model = Loss(), DistributedDataParallel(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for epoch in range(5):
        sampler.epoch = epoch
        ddp_model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(ddp_model(x + torch.rand_like(x)), y).backward()
            optimizer.step()
            average.update_parameters(model)
        for buffer in average.buffers():
            dist.broadcast(buffer, src=0)
        evaluate(ddp_model, test_loader)
        evaluate(average, test_loader)
        if rank == 0:
            torch.save({"average": average.state_dict()}, __file__ + ".pt")
            os.remove(__file__ + ".pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
