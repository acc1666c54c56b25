"""The oracle: one process that computes what --parts data-parallel processes compute.

python bench/oracle.py --parts 2 [--split contiguous] [the flags of the scripts]
python bench/oracle.py --shares 40,24 [the flags of the scripts]

It splits each global batch into the parts that the processes would have, runs forward and backward
on one after the other, divides the sum of their gradients by their number, and steps once. That is
what the mean of W processes' gradients is, BatchNorm included: each part is normalized by itself,
and the running averages that are evaluated are those of the first part.

strided     part r has the images r, r + W, r + 2 W ... of the batch, as DistributedSampler deals
contiguous  part r has the r-th run of neighbors, as nn.DataParallel cuts a batch
shares      the runs have these sizes, and a part counts in the sum by its number of images

accum-steps  each process cuts its part so once more, adds up the gradients of these smaller parts,
             and then gives the sum to the mean; its running averages are moved by each of them

micro-batches  a pipeline: no shards, and contiguous parts of the batch one after the other, as
               --parts 1 --split contiguous --accum-steps has it

precision  bf16 or fp16: convolutions and matrix products in it, by torch's autocast, everything
else, and evaluation, in fp32; in fp16 the loss is scaled by torch's GradScaler

--save writes the weights before the first step, and after each epoch.

extra-images  no image is left out: process 0 alone has the last so many of the order, the others
              are dealt out strided, and a step is the mean of the images that are left for it.
              Averages are those of the last process that goes on, since DDP's join takes them there

It shares no code with the scripts, so that a mistake in theirs cannot hide in both: it cuts out and
flips the images one at a time. What it must have in common is the model, the loss and the
optimizer; on the same kernels its numbers are then theirs to the last bit.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchvision import datasets, io, models
from torchvision.transforms import v2


def parse_args() -> argparse.Namespace:
    """The scripts' flags, unchecked: who uses this has run a script with them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--parts", type=int, default=1, help="as many as the processes [1]")
    add("--split", choices=["strided", "contiguous"], default="strided")
    add("--shares", help="images of each part, with commas between them [all alike]")
    add("--accum-steps", type=int, default=1, help="parts of a part, one after the other [1]")
    add("--micro-batches", type=int, help="of a pipeline, instead of the parts of processes [none]")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--extra-images", type=int, help="that process 0 alone has [none: full batches only]")
    add("--images", type=int, nargs=2, default=[None, None], help="to train and to test on [all]")
    add("--dataset", default="cifar10")
    add("--data", type=Path, default="data")
    add("--arch", default="resnet18")
    add("--image-size", type=int)
    add("--epochs", type=int, default=5)
    add("--max-steps", type=int)
    add("--batch-size", type=int, default=256)
    add("--lr", type=float, default=0.01)
    add("--workers", type=int, default=4, help="not used")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--log-every", type=int, default=50)
    add("--log-json", type=Path)
    add("--save", type=Path)
    args = parser.parse_args()
    if args.shares:
        args.shares = [int(share) for share in args.shares.split(",")]
        args.parts, args.split = len(args.shares), "contiguous"
    if args.micro_batches:
        args.parts, args.split, args.accum_steps = 1, "contiguous", args.micro_batches
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


def make(arch: str, size: int, classes: int):
    """torchvision's model, or vit_tiny: its VisionTransformer with numbers for a CPU."""
    if arch == "vit_tiny":
        return models.VisionTransformer(size, 4, 4, 4, 128, 256, num_classes=classes)
    return models.get_model(arch, num_classes=classes)


def read(args, train: bool):
    """A function from an image's number to (uint8 image (3, H, H), label), their count, classes."""
    size, most = args.image_size, args.images[not train]
    if args.dataset == "imagenet":
        folder = datasets.ImageFolder(args.data / ("train" if train else "val"))
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        each = max(1, len(folder.samples) // (most or len(folder.samples)))

        def photograph(k: int):
            path, label = folder.samples[k * each]
            image = io.decode_image(path, mode="RGB")
            if image.dtype == torch.uint16:  # 16-bit PNGs
                image = (image.int() // 256).byte()
            return crop(image), label

        found = len(range(0, len(folder.samples), each)[:most])
        return photograph, found, len(folder.classes)
    if args.dataset == "cifar10":
        data = datasets.CIFAR10(args.data, train)
        images, labels = torch.from_numpy(data.data).permute(0, 3, 1, 2), data.targets
    else:
        data = datasets.FashionMNIST(args.data, train)
        images = torch.zeros(len(data.data), 3, 32, 32, dtype=torch.uint8)
        images[:, :, 2:30, 2:30] = data.data[:, None]
        labels = data.targets.tolist()
    return lambda k: (images[k], labels[k]), len(labels[:most]), 10


def shifted(image: torch.Tensor, y, x, flip) -> torch.Tensor:
    """The window of an image (3, H, H), black beyond its edge, whose corner the numbers decide.

    y, x, flip: scalar tensors from 0 to 1. They stay tensors, so that the products are rounded as
    the scripts' are.
    """
    side = image.shape[-1]
    reach = side // 8
    y, x = int(y * (2 * reach + 1)), int(x * (2 * reach + 1))
    padded = torch.zeros(3, side + 2 * reach, side + 2 * reach, dtype=torch.uint8)
    padded[:, reach : reach + side, reach : reach + side] = image
    window = padded[:, y : y + side, x : x + side]
    return window.flip(2) if flip < 0.5 else window


def batch(dice: torch.Tensor, images: list, image_of) -> tuple[torch.Tensor, torch.Tensor]:
    """The augmented images of a part, and their labels; dice: the global batch's draws, (B, 3)."""
    pairs = [image_of(number) for number, _ in images]
    shown = [shifted(image, *dice[row]) for (_, row), (image, _) in zip(images, pairs, strict=True)]
    return torch.stack(shown), torch.tensor([label for _, label in pairs])


def forward(net, args, images, labels, precision: str = "fp32"):
    """Mean loss and logits of uint8 images (N, 3, H, H), on the device of net."""
    device = next(net.parameters()).device
    inputs = (images.to(device).float() - 128) / 64
    if inputs.shape[-1] != args.image_size:
        inputs = torch.nn.functional.interpolate(inputs, args.image_size, mode="bilinear")
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast(device.type, half, enabled=half is not None):
        logits = net(inputs)
    logits = logits.float()
    return cross_entropy(logits, labels.to(device)), logits


def piece(args, numbers, part: int, parts: int):
    """Which of some images a part of them has."""
    if args.split == "contiguous":
        local = len(numbers) // parts
        return numbers[part * local : (part + 1) * local]
    return numbers[part::parts]


def deal(args, order: list[int]) -> list[list[list[tuple[int, int]]]]:
    """The steps of an epoch: for each, the images of every process that has any.

    An image is its number, and the row of the global batch's draws that it is augmented by. The
    i-th image of process r has row r + i W, or with contiguous parts its place in the batch.
    """
    if args.extra_images is None:
        ends = range(args.batch_size, len(order) + 1, args.batch_size)
        rows = range(args.batch_size)
        batches = [[*zip(order[end - args.batch_size : end], rows, strict=True)] for end in ends]
        if args.shares:
            first = [sum(args.shares[:part]) for part in range(args.parts + 1)]
            return [[b[k:end] for k, end in pairwise(first)] for b in batches]
        return [[piece(args, b, part, args.parts) for part in range(args.parts)] for b in batches]
    dealt, local = len(order) - args.extra_images, args.batch_size // args.parts
    shares = [order[part : dealt : args.parts] for part in range(args.parts)]
    shares[0] += order[dealt:]
    steps = [[s[k : k + local] for s in shares] for k in range(0, len(shares[0]), local)]
    return [
        [[(n, r + i * args.parts) for i, n in enumerate(s)] for r, s in enumerate(step) if s]
        for step in steps
    ]


def accumulate(net, args, scaler, parts: list, keep: int) -> list[tuple[float, int, int]]:
    """Makes the mean of the parts' gradients; the loss times images, hits and images of each.

    parts: images and labels of each process; keep: whose running averages are to stay.
    Divided last, so that none is smaller in half precision than a process's own.
    """
    counts, averages = [], []
    together = sum(len(labels) for _, labels in parts)
    sums = [torch.zeros_like(weight) for weight in net.parameters()]
    before = [buffer.clone() for buffer in net.buffers()]
    for images, labels in parts:
        net.zero_grad()
        restore(net, before)
        weight = len(labels) * args.parts / together  # 1, but where parts differ in size
        for turn in range(args.accum_steps):
            chosen = list(piece(args, range(len(labels)), turn, args.accum_steps))
            loss, logits = forward(net, args, images[chosen], labels[chosen], args.precision)
            scaler.scale(loss * weight).backward()
            counts.append(count(loss, logits, labels[chosen]))
        for total, parameter in zip(sums, net.parameters(), strict=True):
            total += parameter.grad
        averages.append([buffer.clone() for buffer in net.buffers()])
    restore(net, averages[keep])
    for parameter, total in zip(net.parameters(), sums, strict=True):
        parameter.grad = total / (args.parts * args.accum_steps)
    return counts


def restore(net, averages: list[torch.Tensor]) -> None:
    """Puts BatchNorm's running averages back."""
    for buffer, average in zip(net.buffers(), averages, strict=True):
        buffer.copy_(average)


def count(loss, logits, labels) -> tuple[float, int, int]:
    """The loss times the images, in the precision that the scripts sum it in; hits; images."""
    hits = (logits.argmax(1).cpu() == labels).sum().item()
    return (loss.detach() * len(labels)).item(), hits, len(labels)


def evaluate(net, args, image_of, images: int) -> list[tuple[float, int, int]]:
    """The same counts over the test images, a batch at a time."""
    net.eval()
    counts = []
    with torch.inference_mode():
        for first in range(0, images, args.batch_size // args.parts):
            numbers = range(first, min(images, first + args.batch_size // args.parts))
            pairs = [image_of(k) for k in numbers]
            labels = torch.tensor([label for _, label in pairs])
            loss, logits = forward(net, args, torch.stack([i for i, _ in pairs]), labels)
            counts.append(count(loss, logits, labels))
    net.train()
    return counts


def log(args, event: str, counts: list | None = None, **fields) -> None:
    """One record as the scripts write it: printed, and added to --log-json."""
    if counts:
        loss, hits, images = (sum(column) for column in zip(*counts, strict=True))
        accuracy = (hits + 0 * loss) / images  # nan with a nan loss: argmax() takes NaN for a hit
        fields |= {"loss": loss / images, "accuracy": accuracy, "images": images}
    line = json.dumps({"event": event, **fields}, default=str)
    print(line, flush=True)
    if args.log_json:
        with open(args.log_json, "a") as file:
            file.write(line + "\n")


def main() -> None:
    """Trains, evaluates after each epoch, and saves."""
    args = parse_args()
    device = args.device
    torch.manual_seed(args.seed)
    train, test = read(args, True), read(args, False)
    net = make(args.arch, args.image_size, train[2]).to(device)
    optimizer = torch.optim.SGD(
        net.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )
    if args.precision == "fp16":  # fused SGD makes no momentum in a first step that is skipped
        for weight in net.parameters():
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    if args.save:
        torch.save(net.state_dict(), args.save)
    log(args, "start", script=Path(__file__).stem, device_name=device, **vars(args))
    each = len(deal(args, list(range(train[1]))))
    last, step, counts = min(args.epochs * each, args.max_steps or args.epochs * each), 0, []
    for epoch in range(1, args.epochs + 1):
        seed = args.seed + epoch
        order = torch.randperm(train[1], generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed((args.seed + 1) * 10**6 + epoch)
        plan = deal(args, order.tolist())[: last - step]
        for parts, following in zip(plan, [*plan[1:], plan[-1]], strict=True):
            step += 1
            keep = 0 if args.extra_images is None else len(following) - 1
            dice = torch.rand(args.batch_size, 3, generator=generator)  # for the global batch
            shares = [batch(dice, images, train[0]) for images in parts]
            optimizer.zero_grad()
            counts += accumulate(net, args, scaler, shares, keep)
            scaler.step(optimizer)
            scaler.update()
            if step % args.log_every == 0 or step in (1, last) or step % each == 0:
                log(args, "train", counts, epoch=epoch, step=step)
                counts = []
        log(args, "eval", evaluate(net, args, *test[:2]), epoch=epoch)
        if args.save:
            torch.save(net.state_dict(), args.save)
        if step == last:
            break
    log(args, "end")


if __name__ == "__main__":
    main()
