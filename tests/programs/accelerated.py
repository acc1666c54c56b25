"""Accelerate's usual loop: accumulated gradients, a warm-up from zero, gathered predictions.

Its loaders fetch one batch ahead, and the ranks' last batches are filled with whole ones.
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x, y = torch.rand(140, 8), torch.randint(0, 5, (140,))
    train_loader = DataLoader(TensorDataset(x[:100], y[:100]), 20, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[100:], y[100:]), 16)
    model = torch.nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10))
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )
    torch.manual_seed(accelerator.process_index)
    for _ in range(6):
        model.train()
        for x, y in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x + torch.rand_like(x)), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        hits, total = 0, 0
        for x, y in test_loader:
            with torch.no_grad():
                guesses = model(x).argmax(1)
            guesses, y = accelerator.gather_for_metrics((guesses, y))
            hits, total = hits + int((guesses == y).sum()), total + len(y)
        accelerator.print(f"{hits} of {total} images are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
