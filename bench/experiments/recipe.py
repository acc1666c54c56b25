"""python -m bench.experiments.recipe --record FILE --seconds 15 --data FOLDER [FLAGS]

Measures imagenet.py's loader by itself and its training by itself, in images per second over all
ranks. The smaller of the two limits a training; the exchange of gradients comes on top. Its own
main() prepares everything, and only fit() is replaced. `torchrun ... -m bench.experiments.recipe`
measures several ranks. Rank 0 appends a line of JSON to FILE.
"""

import argparse
import functools
import itertools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from faulthandler import cancel_dump_traceback_later
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import imagenet

FIELDS = "arch image_size batch_size precision channels_last compile workers".split()


def endless(loader: DataLoader, args, world) -> Iterator:
    """The batches of all epochs. No epoch ends: its end would wait for all workers."""

    def keys() -> Iterator:
        for epoch in itertools.count(1):
            loader.sampler.begin(epoch, 0)
            yield from loader.sampler

    how = loader.batch_size, args.workers, world
    return imagenet.Batches(imagenet.make_loader(loader.dataset, keys(), *how))


def steps_on(batch: tuple, model: torch.nn.Module, args, world) -> Callable[[], int]:
    """A function that trains some steps on the same batch, and returns the number of images."""
    images, labels = batch
    model.train()
    trained = torch.compile(model) if args.compile else model
    optimizer = imagenet.make_optimizer(model, args)
    count = 10 if world.device.type == "cuda" else 1  # steps for one wait: a GPU gets work ahead

    def work() -> int:
        for _ in range(count):
            optimizer.zero_grad()
            with imagenet.autocast(args, world):
                logits = trained(images)
            losses = imagenet.losses_of(logits, labels, args.label_smoothing)
            losses.mean().backward()
            optimizer.step()
        return count * len(losses.tolist())  # waits for the device

    return work


def images_per_second(work: Callable[[], int], seconds: float) -> float:
    """The speed of a function that returns how many images it has processed."""
    for _ in range(3):  # workers start, algorithms are tried
        work()
    begun, images = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        images += work()
    return images / (time.perf_counter() - begun)


def fit(own, model, train_loader, test_loader, stop, args, world) -> None:
    """Instead of imagenet.py's training: measures its parts. `own` are this module's flags."""
    cancel_dump_traceback_later()
    for number in imagenet.SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # there is nothing to save
    batches = endless(train_loader, args, world)
    speeds = [images_per_second(lambda: len(next(batches)[1]), own.seconds)]
    work = steps_on(imagenet.to_device(*next(batches), args, world), model, args, world)
    dist.barrier()  # no rank trains while another one still loads
    speeds.append(images_per_second(work, own.seconds))
    total = torch.tensor(speeds, dtype=torch.float64)
    dist.all_reduce(total)
    loading, training = total.tolist()
    found = {"event": "bench", "loader": loading, "device": training}
    found["limit"] = "the loader" if loading < training else "the device"
    cuda = world.device.type == "cuda"
    found |= {"device_name": torch.cuda.get_device_name() if cuda else "cpu"}
    found |= {"world_size": world.size, "torch": torch.__version__}
    found |= {"classes": len(train_loader.dataset.classes)}
    found |= {name: getattr(args, name) for name in FIELDS}
    if world.rank == 0:
        print(json.dumps(found), flush=True)
        with open(own.record, "a") as file:
            print(json.dumps(found), file=file)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[2], allow_abbrev=False)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part [15]")
    own, words = parser.parse_known_args(argv)
    imagenet.fit = functools.partial(fit, own)
    with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
        imagenet.run(imagenet.parse_args(["--out", folder, *words]))


if __name__ == "__main__":
    main(sys.argv[1:])
