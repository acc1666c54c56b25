"""The oracle of techniques/oneflow_ddp.py: what --parts ranks must compute, in one process.

It runs in OneFlow's environment, and shares no code with the script. NumPy cuts out and flips the
images one at a time. Each part of a batch is normalized by itself, as each rank's is. Its loss is
divided by the number of parts, so that the gradients add up to their mean. Of each epoch it prints
the loss of each step, then that of the test images, by the BatchNorm statistics of the first part.
"""

import argparse
from pathlib import Path

import numpy as np
import oneflow as flow
from flowvision import models


def read(folder, part):
    """The images in [-2, 2), as (N, 3, 32, 32), and their labels."""
    raw = Path(folder, "FashionMNIST", "raw")
    pixels = np.fromfile(raw / f"{part}-images-idx3-ubyte", np.uint8)[16:]  # behind the header
    labels = np.fromfile(raw / f"{part}-labels-idx1-ubyte", np.uint8)[8:]
    pixels = np.pad(pixels.reshape(-1, 1, 28, 28), [(0, 0), (0, 0), (2, 2), (2, 2)])
    return (pixels.repeat(3, axis=1).astype(np.float32) - 128) / 64, labels.astype(np.int64)


def crop(image, draw):
    """One image, shifted and perhaps flipped, by its three random numbers. Black is -2."""
    row, column = (int(np.float32(9) * number) for number in draw[:2])
    padded = np.pad(image, [(0, 0), (4, 4), (4, 4)], constant_values=-2)
    image = padded[:, row : row + 32, column : column + 32]
    return image[:, :, ::-1] if draw[2] < 0.5 else image


def step(model, optimizer, images, labels, parts):
    """One step; the loss."""
    optimizer.zero_grad()
    total, kept = 0, {}
    for part in range(parts):
        logits = model(flow.tensor(images[part::parts]))
        if part == 0:  # rank 0's, before the other parts change them
            kept = {name: value.numpy().copy() for name, value in model.named_buffers()}
        loss = flow.nn.functional.cross_entropy(logits, flow.tensor(labels[part::parts]))
        (loss / parts).backward()
        total += loss.item() / parts
    for name, value in model.named_buffers():
        value.copy_(flow.tensor(kept[name]))
    optimizer.step()
    return total


def main(args):
    images, labels = read(args.data, "train")
    test_images, test_labels = read(args.data, "t10k")
    flow.manual_seed(0)
    model = getattr(models, args.arch)(num_classes=10)
    optimizer = flow.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    shuffle, draw = flow.Generator(), flow.Generator()
    for epoch in range(1, args.epochs + 1):
        shuffle.manual_seed(epoch)
        draw.manual_seed(1_000_000 + epoch)
        order = flow.randperm(len(images), generator=shuffle).numpy()
        model.train()
        for first in range(0, len(images) - args.batch_size + 1, args.batch_size):
            batch = order[first : first + args.batch_size]
            draws = flow.rand(args.batch_size, 3, generator=draw).numpy()
            cut = [crop(images[k], numbers) for k, numbers in zip(batch, draws, strict=True)]
            print(step(model, optimizer, np.stack(cut), labels[batch], args.parts))
        model.eval()
        with flow.no_grad():
            logits = model(flow.tensor(test_images))
            print(flow.nn.functional.cross_entropy(logits, flow.tensor(test_labels)).item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--arch")
    for name, kind in (("parts", int), ("epochs", int), ("batch-size", int), ("lr", float)):
        parser.add_argument(f"--{name}", type=kind)
    main(parser.parse_args())
