"""Train an image classifier with DataParallel: one process that splits each batch over the GPUs.

python snmc_dp.py
python snmc_dp.py --dataset imagenet --data FOLDER --arch resnet50

Start reading at main(). All scripts here train on the same images in the same batches, augmented
alike; `diff -u snsc.py mnmc_ddp_launch.py` shows what it takes to use several devices for it.
Left out on purpose: learning-rate schedule, random resized crops, mixed precision, resuming.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


class UserError(Exception):
    """An error that the user can fix: run() prints it as one line."""


def main(args):
    started = time.perf_counter()

    # 0. where this process runs
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here, try --device cpu")
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cudnn.benchmark = True  # try cuDNN's algorithms once, then use the fastest

    # 1. data
    torch.manual_seed(args.seed)  # for the weights, and for synthetic images
    train_set, test_set, classes = load_both(args)
    # shuffle=True would do. With a generator, set anew for each epoch, all scripts shuffle alike.
    generator = torch.Generator()
    sampler = RandomSampler(train_set, generator=generator)
    train_loader = make_loader(train_set, sampler, args.batch_size, args.workers, device)
    indices = range(len(test_set))
    test_loader = make_loader(
        test_set, indices, args.batch_size, args.workers, device, drop_last=False
    )

    # 2. model
    model = models.get_model(args.arch, num_classes=len(classes)).to(device)
    # In every step it copies the model to all GPUs, gives each a part of the batch, and gathers the
    # logits on the first. Without GPUs it would only pass them on.
    dp_model = torch.nn.DataParallel(model) if cuda else model

    # 3. optimizer
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )

    # 4. train
    about = {
        "script": Path(__file__).stem,
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,
    }
    log(args.log_json, "start", **about, **vars(args))

    step = 0
    for epoch in range(1, args.epochs + 1):
        generator.manual_seed(args.seed + epoch)
        model.train()
        meter = Meter(device)

        for images, labels in meter.timed(train_loader):
            step += 1
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            images = augment(images, args.seed, step)
            images = prepare(images, args.image_size)

            logits = dp_model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            meter.add(loss, logits, labels)
            last = step % len(train_loader) == 0 or step == args.max_steps
            if last or step % args.log_every == 0 or step == 1:  # step 1 shows that it runs
                result = meter.result()
                log(args.log_json, "train", epoch=epoch, step=step, **result)
            if step == args.max_steps:
                break

        # 5. evaluate
        result = evaluate(model, test_loader, device, args.image_size)
        log(args.log_json, "eval", epoch=epoch, **result)
        if args.save:
            save(model.state_dict(), args.save)
        if step == args.max_steps:
            break

    # 6. finish
    memory = peak_memory(device)
    seconds = time.perf_counter() - started
    log(args.log_json, "end", seconds=seconds, peak_memory_mib=memory)


def load_both(args):
    """The training images, the test images and the names of the classes; or a UserError."""
    try:
        train_set, classes = load_data(args.dataset, args.data, args.image_size, train=True)
        test_set, test_classes = load_data(args.dataset, args.data, args.image_size, train=False)
    except (AssertionError, EOFError, OSError, RuntimeError, ValueError) as error:
        # What torchvision raises for missing or damaged files.
        raise UserError(f"--data {args.data}: cannot load {args.dataset}: {error!r}") from None
    if classes != test_classes:
        raise UserError(f"--data {args.data}: train/ and val/ must have the same class folders")
    if args.batch_size > len(train_set):
        raise UserError(f"--batch-size {args.batch_size}: there are only {len(train_set)} images")
    return train_set, test_set, classes


def load_data(name, folder, size, train):
    """The training or the test images of a data set, as uint8, and the names of its classes."""
    if name == "imagenet":  # photographs, in one folder for each class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The others fit into memory: images (N, 3, H, W), labels (N).
    if name == "cifar10":
        data = datasets.CIFAR10(folder, train, download=True)
        images = torch.tensor(data.data).permute(0, 3, 1, 2)
        labels, classes = torch.tensor(data.targets), data.classes
    elif name == "fashion-mnist":  # gray, 28 x 28; it lies in this repository
        data = datasets.FashionMNIST(folder, train)
        images = F.pad(data.data, [2, 2, 2, 2])  # a black edge makes it 32 x 32
        images = images[:, None].expand(-1, 3, -1, -1)  # red = green = blue
        labels, classes = data.targets, data.classes
    else:  # synthetic: each class is a shade of gray, with noise
        classes = list(range(10))
        labels = torch.arange(10_000 if train else 2_000) % 10
        noise = torch.randint(64, (len(labels), 3, size, size), dtype=torch.uint8)
        images = 20 * labels.byte().view(-1, 1, 1, 1) + noise
    return TensorDataset(images.contiguous(), labels), classes


def decode(path):
    """A photograph as uint8 (3, H, W)."""
    try:
        return decode_image(path, mode="RGB")
    except RuntimeError as error:  # its message does not say which file
        raise OSError(f"{path}: damaged, or not a photograph: {error}") from None


def make_loader(dataset, sampler, batch_size, workers, device, drop_last=True):
    """A loader of batches (images, labels) of a TensorDataset, or of photographs.

    sampler: the indices of the images, in order. workers: processes that decode photographs.
    drop_last: without the last batch, if that is smaller.
    """
    batches = BatchSampler(sampler, batch_size, drop_last)  # lists of indices
    pin = device.type == "cuda"  # pinned memory: copies to the GPU overlap with computing
    if isinstance(dataset, TensorDataset):
        # dataset[list of indices] is a whole batch; batch_size=None: the loader adds nothing to it.
        return DataLoader(dataset, sampler=batches, batch_size=None, pin_memory=pin)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,  # the same processes in every epoch
        pin_memory=pin,
    )


class Meter:
    """Adds up loss, hits and images, and the time.

    The sums stay on the device, so that no step has to wait for it.
    """

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.started = time.perf_counter()
        self.waited = 0.0

    def timed(self, loader):
        """The batches of the loader; adds up the seconds that the caller waits for them."""
        asked = time.perf_counter()
        for batch in loader:
            self.waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def add(self, loss, logits, labels):
        """Adds a batch: its mean loss, its logits (N, classes), its labels (N)."""
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def result(self):
        """Means, counts and seconds since the last result. Waits for the device."""
        loss, hits, images = self.sums.tolist()
        now = time.perf_counter()
        result = {
            "loss": loss / images,
            "accuracy": hits / images,
            "images": int(images),
            "seconds": now - self.started,
            "data_seconds": self.waited,
        }
        self.sums.zero_()
        self.started = now
        self.waited = 0.0
        return result


def augment(images, seed, step):
    """Shifts each image (N, 3, H, H) by up to an eighth of its side, and flips about one in two.

    By how much depends on seed and step alone, so that all scripts treat an image alike.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)  # it takes 32 bits of that
    pin = images.is_cuda
    numbers = torch.randint(2**31, (3, len(images)), generator=generator, pin_memory=pin)
    row, column, flip = numbers.to(images.device, non_blocking=True)

    places = images.shape[-1] // 8 * 2 + 1
    images = shift(images, row % places, column % places)
    return torch.where((flip % 2 == 1).view(-1, 1, 1, 1), images.flip(3), images)


def shift(images, row, column):
    """Of each image (N, 3, H, H), with an eighth of black around it, a part as large as the image.

    row, column: (N), where that part begins, from 0 to twice an eighth of the side.
    """
    side = images.shape[-1]
    padded = F.pad(images, [side // 8] * 4)
    # All parts of each image, (N, 3, rows, columns, H, H). This is a view: nothing is copied yet.
    parts = padded.unfold(2, side, 1).unfold(3, side, 1)
    n = torch.arange(len(images), device=images.device)
    return parts[n, :, row, column]  # for each n one part: (N, 3, H, H)


def prepare(images, size):
    """uint8 images as the model takes them: floats from -2 to 2, (N, 3, size, size)."""
    images = (images.float() - 128) / 64
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear")
    return images


@torch.no_grad()
def evaluate(model, loader, device, size):
    """Loss, accuracy and number of the loader's images."""
    model.eval()
    meter = Meter(device)
    for images, labels in meter.timed(loader):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(prepare(images, size))
        meter.add(F.cross_entropy(logits, labels), logits, labels)
    return meter.result()


def peak_memory(device):
    """The most MiB that tensors took on the GPU; on a CPU, that this process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return getrusage(RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts it in KiB


def log(path, event, **fields):
    """Prints a line for people; appends it to the file, if one is named, as JSON for programs."""
    shown = (f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
    print(event, *shown, flush=True)
    if path:
        record = {"event": event, "time": time.time(), **fields}
        if not math.isfinite(record.get("loss", 0)):
            record["loss"] = None  # JSON has no nan
        with open(path, "a") as file:
            print(json.dumps(record, default=str), file=file)


def save(weights, path):
    """Writes the whole file or nothing: if the disk is full, an old file stays as it was."""
    part = path.with_name(path.name + ".part")
    try:
        torch.save(weights, part)
        part.replace(path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise OSError(f"--save {path}: not written, an old file stays: {error}") from None


def between(least, most, kind=int):
    """A type for argparse: a number from least to most."""

    def number(text):
        value = kind(text)
        if not least <= value <= most:  # so it refuses nan, too
            raise argparse.ArgumentTypeError(f"{text}: give a number from {least} to {most}")
        return value

    return number


def writable_file(text):
    """A type for argparse: a file that can be written, there or not."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: name a file that you may write to")
    return path


def check_model(arch, size):
    """Raises UserError unless torchvision has this classifier and it takes images of this size."""
    # googlenet and inception return more than logits in training.
    if arch not in models.list_models(models, exclude=["googlenet", "inception*"]):
        raise UserError(f"--arch {arch}: torchvision has no such model for classification")
    with torch.device("meta"):  # tensors that have a shape only: this takes no time
        model = models.get_model(arch).eval()
        try:
            model(torch.empty(1, 3, size, size))
        except (AssertionError, RuntimeError) as error:
            raise UserError(f"--image-size {size}: {arch} can't take it: {error}") from None


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # or an error would print it, too
    )
    add = parser.add_argument
    names = ["cifar10", "fashion-mnist", "imagenet", "synthetic"]
    count = between(1, 10**9)
    add("--dataset", choices=names, default="cifar10", help="images to train on [%(default)s]")
    add("--data", type=Path, default=Path("data"), help="folder of the images [%(default)s]")
    add("--arch", default="resnet18", help="classification model of torchvision [%(default)s]")
    add("--image-size", type=between(1, 4096), help="pixels a side [32; for imagenet 224]")
    add("--epochs", type=count, default=5, help="passes over the images [%(default)s]")
    add("--max-steps", type=count, help="stop after so many steps [no limit]")
    add("--batch-size", type=between(2, 10**9), default=256, help="images a step [%(default)s]")
    add("--lr", type=between(1e-9, 1e9, float), default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=between(0, 999), default=4, help="for photographs [%(default)s]")
    add("--seed", type=between(0, 10**9), default=0, help="of all that is random [%(default)s]")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if any")
    add("--log-every", type=count, default=50, help="steps between two lines [%(default)s]")
    add("--log-json", type=writable_file, help="append all lines to this file, as JSON [none]")
    add("--save", type=writable_file, help="write the weights here after each epoch [nowhere]")
    args = parser.parse_args()
    if args.image_size is None:
        args.image_size = 224 if args.dataset == "imagenet" else 32
    return args


def run(args):
    """main(), with one line in place of a traceback for errors that the user can fix."""
    try:
        check_model(args.arch, args.image_size)
        main(args)
    except (OSError, UserError) as error:
        line = str(error).strip().split("\n")[-1]  # before it, a loader's worker puts its traceback
        print(f"{Path(__file__).name}: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run(parse_args())
