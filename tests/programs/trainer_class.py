"""A Trainer class, with a scheduler, gathered predictions, and a checkpoint by rank 0."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Trainer:
    def __init__(self, model, train_set, test_set):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        sampler = DistributedSampler(train_set)
        self.loader = DataLoader(train_set, 16, sampler=sampler)
        own = Subset(test_set, range(self.rank, len(test_set), self.size))
        self.test_loader = DataLoader(own, 16)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.schedule.step()
            self.evaluate()
            if self.rank == 0:
                self.save(__file__ + ".pt")

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        total = torch.zeros(2)
        for x, y in self.test_loader:
            total += torch.tensor([(self.model.module(x) - y).square().sum(), len(x)])
        dist.all_reduce(total)
        if self.rank == 0:
            print("error", float(total[0] / total[1]))

    def save(self, path):
        torch.save({"model": self.model.module.state_dict()}, path)
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(203, 8), torch.rand(203, 1))
    train_set, test_set = Subset(data, range(160)), Subset(data, range(160, 203))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    Trainer(model, train_set, test_set).fit(5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
