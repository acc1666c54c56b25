"""Train an image classifier with DataParallel: one process that splits each batch over all GPUs.

python snmc_dp.py
python snmc_dp.py --dataset imagenet --data FOLDER --arch resnet50
Without a download, on images that come with this project:
python snmc_dp.py --dataset fashion-mnist

Start reading at main(). All scripts of this project train on the same images, in the same order.
`diff -u snsc.py mnmc_ddp_launch.py` shows what several processes need.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


def main(args):
    # 0. device
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True  # cuDNN tries its algorithms and keeps the fastest

    # 1. data
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes or any(name.startswith(".") for name in classes):
        sys.exit(f"--data {args.data}: train/ and val/ need equal class folders, no hidden ones")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    if args.workers and len(tempfile.gettempdirb()) > 75:  # workers put sockets there
        sys.exit("TMPDIR is too long a path for loader workers, which would hang: set it to /tmp")
    # Like shuffle=True, with a generator that section 5 seeds in every epoch.
    shuffle_rng = torch.Generator()
    sampler = RandomSampler(train_set, generator=shuffle_rng)
    loader_options = {
        "batch_size": args.batch_size,
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,  # keep them between epochs
        "pin_memory": args.device == "cuda",  # lets .to(device, non_blocking=True) return at once
    }
    # drop_last=True skips an incomplete last batch, so that all steps have the same batch size.
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loader_options)
    test_loader = DataLoader(test_set, **loader_options)

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

    # 4. resume
    first_epoch = 1
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")  # not on the GPU that saved it
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])  # its learning rate replaces --lr
        first_epoch = checkpoint["epoch"] + 1
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        if args.save.is_dir() or not os.access(args.save.parent, os.W_OK):
            sys.exit(f"--save {args.save}: must be a file, in a folder that is writable")

    # 5. train
    log("start", gpus=torch.cuda.device_count(), classes=len(classes), **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # The seeds depend only on --seed and the epoch, so a resumed run has the same batches.
        shuffle_rng.manual_seed(args.seed + epoch)
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # never the shuffle's seed
        meter = Meter(device)
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # One row of random numbers per image: row and column of its crop, flip.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws.to(device, non_blocking=True)  # too small to need pinned memory
            images = augment(images, draws)

            images = to_input(images, args.image_size)
            logits = dp_model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            meter.add(loss, logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)  # each line covers the steps since the last one

        # 6. evaluate
        metrics = evaluate(model, test_loader, device, args.image_size)
        log("eval", epoch=epoch, **metrics)
        if args.save:
            save(args.save, model, optimizer, epoch)

    # 7. finish
    log("end", peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20)  # 0 on a CPU


def load_dataset(name, folder, size, train):
    """The training or the test images, as uint8, and the names of the classes."""
    if name == "imagenet":  # photographs, in one folder per class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The others fit into memory: images (N, 3, H, W), which to_input() resizes, and labels (N).
    if name == "cifar10":
        data = datasets.CIFAR10(folder, train, download=True)
        images = torch.tensor(data.data).permute(0, 3, 1, 2)
        labels = torch.tensor(data.targets)
    else:  # fashion-mnist: gray, 28 x 28, in the folder data/ of this project
        data = datasets.FashionMNIST(folder, train)
        images = F.pad(data.data, [2, 2, 2, 2])  # (N, 28, 28) to (N, 32, 32)
        images = images[:, None].expand(-1, 3, -1, -1)  # (N, 3, 32, 32): red = green = blue
        labels = data.targets
    return TensorDataset(images.contiguous(), labels), data.classes


def decode(path):
    """An image file as uint8 (3, H, W); of 16 bits per sample, the upper 8."""
    data = bytearray(Path(path).read_bytes())  # decode_image(path) fails for names not in UTF-8
    try:
        image = decode_image(torch.frombuffer(data, dtype=torch.uint8), mode="RGB")
    except (RuntimeError, ValueError) as error:  # ValueError: the file is empty
        raise RuntimeError(f"{path}: {error}") from None
    if image.ndim != 3:
        raise RuntimeError(f"{path}: an animation")
    return (image.int() >> 8).byte() if image.dtype == torch.uint16 else image


def augment(images, draws):
    """Shifts each image by up to an eighth of its side, and flips it with probability 1/2.

    images: (N, 3, side, side). draws: (N, 3), random numbers in [0, 1) for row, column and flip.
    """
    side = images.shape[-1]
    max_shift = side // 8
    shifts = (draws[:, :2] * (2 * max_shift + 1)).long()  # integers from 0 to 2 * max_shift
    row, column = shifts.unbind(1)  # the top left corner of each image's crop
    padded = F.pad(images, [max_shift] * 4)  # left, right, top, bottom
    # The next three lines compute this, but with one copy instead of one per image:
    # torch.stack([p[:, r : r + side, c : c + side] for p, r, c in zip(padded, row, column)])
    crops = padded.unfold(2, side, 1).unfold(3, side, 1)  # (N, 3, rows, columns, side, side)
    n = torch.arange(len(images), device=images.device)
    images = crops[n, :, row, column]  # image i is now crops[i, :, row[i], column[i]]
    flip = draws[:, 2] < 0.5
    return torch.where(flip[:, None, None, None], images.flip(3), images)


def to_input(images, size):
    """uint8 images as floats in [-2, 2), resized to (N, 3, size, size)."""
    images = (images.float() - 128) / 64  # photographs: mean about 0, standard deviation about 1
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
    """Mean loss, accuracy and speed since this Meter was created.

    The sums stay on the device, so add() does not wait for it.
    """

    def __init__(self, device):
        self.started = time.perf_counter()
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images

    def add(self, loss, logits, labels):
        """Adds a batch: its mean loss, its logits (N, classes), its labels (N)."""
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def result(self):
        loss, correct, images = self.sums.tolist()  # waits until the device is done
        seconds = time.perf_counter() - self.started
        return {
            "loss": loss / images,
            "accuracy": (correct + 0 * loss) / images,  # nan with a nan loss: argmax() picks NaN
            "images": int(images),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }


def log(event, **fields):
    """Prints one line. Nine digits, so that two runs can be compared exactly."""
    words = [event]
    for name, value in fields.items():
        words.append(f"{name}={value:.9g}" if isinstance(value, float) else f"{name}={value}")
    print(*words, flush=True)


def save(path, model, optimizer, epoch):
    """Writes a file for --resume. It is renamed when complete: a crash leaves no half file."""
    temporary = path.with_name(path.name + ".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    try:
        torch.save(state, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"{path}: not saved, is the disk full? {error}")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ["cifar10", "fashion-mnist", "imagenet"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--dataset", choices=names, default="cifar10", help="images to train on [%(default)s]")
    add("--data", type=Path, default=Path("data"), help="folder of the data set [%(default)s]")
    add("--arch", default="resnet18", help="classification model of torchvision [%(default)s]")
    add("--image-size", type=int, help="pixels per side [224 for imagenet, else 32]")
    add("--epochs", type=int, default=5, help="passes over the training images [%(default)s]")
    add("--batch-size", type=int, default=256, help="images per step [%(default)s]")
    add("--lr", type=float, default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=int, help="processes per loader [4 for imagenet or cuda, else 0]")
    add("--seed", type=int, default=0, help="random seed [%(default)s]")
    add("--device", choices=["cpu", "cuda"], default=device, help="where to train [%(default)s]")
    add("--log-every", type=int, default=50, help="steps between log lines [%(default)s]")
    add("--save", type=Path, help="write a checkpoint to this file after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch; --lr is ignored [none]")
    args = parser.parse_args()
    if args.image_size is None:
        args.image_size = 224 if args.dataset == "imagenet" else 32
    if args.workers is None:
        args.workers = 4 if args.dataset == "imagenet" or args.device == "cuda" else 0
    return args


if __name__ == "__main__":
    main(parse_args())
