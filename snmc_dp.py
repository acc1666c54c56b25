"""Train an image classifier with DataParallel: one process that splits each batch over all GPUs.

python snmc_dp.py
python snmc_dp.py --dataset imagenet --data FOLDER --arch resnet50
Without a download, on images that come with this project:
python snmc_dp.py --dataset fashion-mnist

Start reading at main(). The scripts of this project differ only where the parallelism does: see
`diff -u snsc.py mnmc_ddp_launch.py`. They train on the same batches with the same augmentation.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


def main(args):
    # 0. device
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True  # try cuDNN's algorithms for a shape, keep the fastest

    # 1. data
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes:
        sys.exit(f"--data {args.data}: train/ and val/ have different class folders")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    # A new order in every epoch. drop_last leaves out the last batch if it is incomplete.
    shuffle_rng = torch.Generator()  # seeded anew in every epoch
    sampler = RandomSampler(train_set, generator=shuffle_rng)
    train_loader = make_loader(
        train_set, sampler, args.batch_size, device, args.workers, drop_last=True
    )
    in_order = range(len(test_set))  # a sampler yields indices: here 0, 1, 2, ...
    test_loader = make_loader(test_set, in_order, args.batch_size, device, args.workers)

    # 2. model
    torch.manual_seed(args.seed)
    model = models.get_model(args.arch, num_classes=len(classes)).to(device)
    # In every step, DataParallel copies the model to all GPUs, gives each GPU a part of the batch,
    # and gathers the logits on GPU 0. Without a GPU, it only calls model.
    dp_model = torch.nn.DataParallel(model)

    # 3. optimizer
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        fused=True,  # updates all weights in a few kernel launches
    )

    first_epoch = 1
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")  # not to the GPU that saved it
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1

    # 4. train
    log("start", gpus=torch.cuda.device_count(), **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # Seeds that depend on the epoch: a resumed run has the same batches and augmentation.
        shuffle_rng.manual_seed(args.seed + epoch)
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # independent of the shuffle
        meter = Meter(device)
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # One row of random numbers per image, drawn on the CPU: the same ones for any device.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            images = augment(images, draws.to(device, non_blocking=True))

            logits = dp_model(to_input(images, args.image_size))
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            meter.add(loss, logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)

        # 5. evaluate
        metrics = evaluate(model, test_loader, device, args.image_size)
        log("eval", epoch=epoch, **metrics)
        if args.save:
            save(args.save, model, optimizer, epoch)

    # 6. finish
    log("end", peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20)


def load_dataset(name, folder, size, train):
    """The training or the test images, as uint8, and the names of the classes."""
    if name == "imagenet":  # photographs, in one folder per class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The other data sets fit into memory: images (N, 3, H, W) and labels (N).
    if name == "cifar10":
        data = datasets.CIFAR10(folder, train, download=True)
        images, labels = torch.tensor(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)
    else:  # fashion-mnist: gray, 28 x 28; comes with this project
        data = datasets.FashionMNIST(folder, train)
        images, labels = F.pad(data.data, [2, 2, 2, 2]), data.targets  # 32 x 32
        images = images[:, None].expand(-1, 3, -1, -1)  # red = green = blue
    return TensorDataset(images.contiguous(), labels), data.classes


def decode(path):
    """An image file as uint8 (3, H, W)."""
    return decode_image(path, mode="RGB")


def make_loader(dataset, sampler, batch_size, device, workers, drop_last=False):
    """Batches (images, labels) of the images whose indices the sampler yields."""
    pin_memory = device.type == "cuda"  # from pinned memory, copies run while Python goes on
    batch_sampler = BatchSampler(sampler, batch_size, drop_last)  # yields lists of indices
    if isinstance(dataset, TensorDataset):
        # The images are in memory: dataset[[5, 2, 7]] is a whole batch. batch_size=None makes
        # DataLoader look up each list at once, not image by image, which takes far longer.
        return DataLoader(dataset, sampler=batch_sampler, batch_size=None, pin_memory=pin_memory)
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=workers,
        persistent_workers=workers > 0,  # keep them alive between epochs
        pin_memory=pin_memory,
    )


def augment(images, draws):
    """Shifts each image by up to an eighth of its side, and flips it with probability 1/2.

    images: (N, 3, side, side). draws: (N, 3), random numbers in [0, 1) for row, column and flip.
    """
    side = images.shape[-1]
    max_shift = side // 8
    row, column = (draws[:, :2] * (2 * max_shift + 1)).long().unbind(1)  # 0 to 2 * max_shift
    padded = F.pad(images, [max_shift] * 4)
    # What follows is this loop, without its many small copies, which would slow a GPU down:
    # torch.stack([p[:, r : r + side, c : c + side] for p, r, c in zip(padded, row, column)])
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)  # all possible crops, not yet copied
    n = torch.arange(len(images), device=images.device)
    images = windows[n, :, row, column]  # of each image, the crop at its row and column
    flip = draws[:, 2] < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def to_input(images, size):
    """uint8 images as floats in [-2, 2), resized to (N, 3, size, size)."""
    images = (images.float() - 128) / 64  # roughly the mean and the deviation of photographs
    if images.shape[-1] != size:
        images = F.interpolate(images, (size, size), mode="bilinear")
    return images


@torch.no_grad()
def evaluate(model, loader, device, size):
    """Mean loss and accuracy over all images of the loader."""
    model.eval()
    meter = Meter(device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(to_input(images, size))
        meter.add(F.cross_entropy(logits, labels), logits, labels)
    return meter.result()


class Meter:
    """Mean loss, accuracy and speed since it was made.

    The sums stay on the device, so add() does not wait for it.
    """

    def __init__(self, device):
        self.started = time.perf_counter()
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images

    def add(self, loss, logits, labels):
        """A batch: its mean loss, its logits (N, classes), its labels (N)."""
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def result(self):
        loss, correct, images = self.sums.tolist()  # waits for the device: only then read the clock
        seconds = time.perf_counter() - self.started
        return {
            "loss": loss / images,
            "accuracy": correct / images,
            "images": int(images),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }


def log(event, **fields):
    """Prints one line."""
    pairs = [f"{k}={v:.9g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()]
    print(event, *pairs, flush=True)


def save(path, model, optimizer, epoch):
    """Writes what --resume needs. The file appears whole: a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, temporary)
    temporary.replace(path)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ["cifar10", "fashion-mnist", "imagenet"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--dataset", choices=names, default="cifar10", help="images to train on [%(default)s]")
    add("--data", type=Path, default="data", help="folder of the data set [%(default)s]")
    add("--arch", default="resnet18", help="classification model of torchvision [%(default)s]")
    add("--image-size", type=int, help="pixels per side [224 for imagenet, else 32]")
    add("--epochs", type=int, default=5, help="passes over the training images [%(default)s]")
    add("--batch-size", type=int, default=256, help="images per step [%(default)s]")
    add("--lr", type=float, default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=int, default=4, help="decoding processes per loader [%(default)s]")
    add("--seed", type=int, default=0, help="random seed [%(default)s]")
    add("--device", choices=["cpu", "cuda"], default=device, help="where to train [%(default)s]")
    add("--log-every", type=int, default=50, help="steps between log lines [%(default)s]")
    add("--save", type=Path, help="write a checkpoint to this file after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch, with its lr [none]")
    args = parser.parse_args()
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


if __name__ == "__main__":
    main(parse_args())
