"""Pipeline parallelism: each rank has some of the layers, and passes micro-batches on.

torchrun --standalone --nproc-per-node 4 techniques/pipeline.py
On two machines (HOST is the first; on the second one: --node-rank 1):
torchrun --nproc-per-node 4 --nnodes 2 --node-rank 0 --master-addr HOST techniques/pipeline.py
Without a GPU, on images that come with this project:
torchrun --standalone --nproc-per-node 2 techniques/pipeline.py --device cpu --dataset fashion-mnist
The default data set, CIFAR-10, is downloaded by snsc.py: run it first, on each machine.

Start reading at main(). The scripts of this project differ only where the parallelism does: see
`diff -u mnmc_ddp_launch.py techniques/pipeline.py`.
They train on the same batches with the same augmentation.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


def main(args):
    # 0. processes and devices
    # torchrun starts --nproc-per-node copies of this script, and tells each one who it is.
    if "RANK" not in os.environ:
        sys.exit("start this script with torchrun, as its first lines show")
    rank = int(os.environ["RANK"])  # among all processes: 0 to 7 on 2 machines with 4 GPUs each
    local_rank = int(os.environ["LOCAL_RANK"])  # on this machine: 0 to 3
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes: 8
    # Join the group of all ranks. Every rank must call every collective (all_reduce, broadcast,
    # what DDP does), in the same order. If a rank skips one, the others wait for it until a
    # timeout: 10 minutes with NCCL, which communicates between GPUs; 30 with Gloo, between CPUs.
    if args.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # otherwise "cuda" would be GPU 0 on every rank
        dist.init_process_group("nccl", device_id=device)  # connects now, through this GPU
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.backends.cudnn.benchmark = True  # try cuDNN's algorithms for a shape, keep the fastest

    # 1. data
    # --batch-size is the batch of a step, as in snsc.py. It is cut into micro-batches: while a rank
    # computes one, the next rank computes the one before. All have the same size, so the mean of
    # their losses is the loss of the batch.
    micro_batch_size, remainder = divmod(args.batch_size, args.micro_batches)
    if remainder:
        sys.exit(f"--batch-size {args.batch_size}: must be a multiple of --micro-batches")
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes:
        sys.exit(f"--data {args.data}: train/ and val/ have different class folders")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    # One replica instead of world_size: every rank reads the whole batch, in the order of snsc.py.
    # The first stage needs its images, the last one its labels. The others read them only to keep
    # the loop simple.
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=args.seed, drop_last=True)
    train_loader = make_loader(
        train_set, sampler, args.batch_size, device, args.workers, drop_last=True
    )
    in_order = range(len(test_set))  # a sampler yields indices: here 0, 1, 2, ...
    test_loader = make_loader(test_set, in_order, args.batch_size, device, args.workers)

    # 2. model
    torch.manual_seed(args.seed)
    model = models.get_model(args.arch, num_classes=len(classes))  # whole, in CPU memory
    Schedule, stages_per_rank = {
        "gpipe": (ScheduleGPipe, 1),
        "1f1b": (Schedule1F1B, 1),
        "interleaved": (ScheduleInterleaved1F1B, 2),
        "zero-bubble": (ScheduleInterleavedZeroBubble, 2),
    }[args.schedule]
    # Stages r and r + world_size are on rank r. There the layers of other stages move to the meta
    # device: they keep names and shapes, and need no memory. So the order of all weights stays, and
    # a checkpoint is that of the other scripts. The optimizer skips weights without a gradient.
    num_stages = stages_per_rank * world_size
    stages, shapes = split(model, num_stages, micro_batch_size, args.image_size)
    for number, stage in enumerate(stages):
        stage.to(device if number % world_size == rank else "meta")
    # With the shapes of its input and output a stage can receive at once. Otherwise it would run
    # once to find out; in some versions of PyTorch that changes BatchNorm's statistics.
    own_stages = [
        PipelineStage(stages[n], n, num_stages, device, shapes[n], shapes[n + 1])
        for n in range(rank, num_stages, world_size)
    ]
    schedule = Schedule(
        own_stages if stages_per_rank > 1 else own_stages[0],
        args.micro_batches,
        loss_fn=F.cross_entropy,
        scale_grads=True,  # the gradient of the batch is the mean of those of its micro-batches
    )
    torch.manual_seed(args.seed + rank)  # from here on another seed per rank, for dropout

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
        # Every rank reads the file: on several machines, put it where all of them see it.
        checkpoint = torch.load(args.resume, map_location="cpu")  # not to the GPU that saved it
        weights = checkpoint["model"]
        own = [name for name, weight in model.state_dict().items() if not weight.is_meta]
        model.load_state_dict({name: weights[name] for name in own}, strict=False)  # this rank's
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1

    # 4. train
    log("start", world_size=world_size, **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # Seeds that depend on the epoch: a resumed run has the same batches and augmentation.
        sampler.set_epoch(epoch)  # without this call, every epoch would have the same order
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # independent of the shuffle
        meter = Meter(device)
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # One row of random numbers per image, drawn on the CPU: the same ones for any device.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            images = augment(images, draws.to(device, non_blocking=True))

            optimizer.zero_grad()
            losses = []  # of the micro-batches
            # Forward and backward of all micro-batches, in the order of the schedule, with all
            # sends and receives: every rank must call it. Only the first stage uses the images,
            # only the last one labels and losses, and returns logits.
            logits = schedule.step(to_input(images, args.image_size), target=labels, losses=losses)
            optimizer.step()

            if rank == world_size - 1:  # on the others, the sums of the meter stay 0
                meter.add(torch.stack(losses).mean(), logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()  # a collective: never under `if rank == 0`
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)

        # 5. evaluate
        metrics = evaluate(model, schedule, args.batch_size, test_loader, device, args.image_size)
        log("eval", epoch=epoch, **metrics)
        if args.save:
            save(args.save, model, optimizer, epoch)  # a collective: never under `if rank == 0`

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
        data = datasets.CIFAR10(folder, train)  # run snsc.py first: it downloads
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
def split(model, num_stages, micro_batch_size, size):
    """Cuts a model into stages of about equally many floating-point operations.

    Returns the stages, each an nn.Sequential of layers of the model; and the shapes of a
    micro-batch, as the first stage takes it and as each stage passes it on: num_stages + 1 tensors
    on the meta device.
    """
    stages, received = [nn.Sequential() for _ in range(num_stages)], []
    model.eval()
    x = to_input(torch.randint(256, (1, 3, size, size), dtype=torch.uint8), size)  # one image
    with FlopCounterMode(display=False) as counter:  # counts convolutions and matrix products
        logits = model(x)
    total, done, number = counter.get_total_flops(), 0, 0
    for layer in find_layers(model):
        with FlopCounterMode(display=False) as counter:
            output = layer(x)
        flops = counter.get_total_flops()
        if flops:  # otherwise it stays with the layer before it: BatchNorm, ReLU
            number = int(num_stages * (done + flops / 2) / total)  # where its middle falls
        if len(stages[number]) == 0:
            received.append(x)
        stages[number].append(layer)
        x, done = output, done + flops
    if not x.equal(logits):
        sys.exit(f"--arch: the layers of {type(model).__name__} do not run one after the other")
    if not all(len(stage) for stage in stages):
        sys.exit(f"--arch: {type(model).__name__} has too few layers for {num_stages} stages")
    shapes = [
        x.new_empty(micro_batch_size, *x.shape[1:], device="meta", requires_grad=True)
        for x in [*received, x]
    ]
    return stages, shapes


def find_layers(model):
    """The layers of a model, in their order. An nn.Sequential counts as the layers in it."""
    layers, todo = [], [*model.children()]
    while todo:
        layer = todo.pop(0)
        if type(layer) is nn.Sequential:
            todo = [*layer, *todo]
        else:
            layers.append(layer)
    # What the forward() of torchvision's models does without a layer, before the linear ones:
    glue = [nn.Flatten()] if hasattr(model, "avgpool") else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    linear = next(n for n, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    return [*layers[:linear], *glue, *layers[linear:]]


@torch.no_grad()
def evaluate(model, schedule, batch_size, loader, device, size):
    """Mean loss and accuracy over all images of the loader. Every rank must call it."""
    model.eval()
    meter = Meter(device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # The stages expect micro-batches of one shape: fill up the last batch with gray images.
        missing = batch_size - len(labels)
        inputs = F.pad(to_input(images, size), [0, 0, 0, 0, 0, 0, 0, missing])
        logits = schedule.eval(inputs, target=F.pad(labels, [0, missing]))
        if logits is not None:  # this rank has the last stage
            logits = logits[: len(labels)]  # without the gray images
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
        """Over all ranks. Every rank must call it."""
        sums = self.sums.clone()  # all_reduce writes its result into its argument
        dist.all_reduce(sums)  # adds up the sums of all ranks
        loss, correct, images = sums.tolist()  # waits for the device: only then read the clock
        seconds = time.perf_counter() - self.started
        return {
            "loss": loss / images,
            "accuracy": correct / images,
            "images": int(images),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }


def log(event, **fields):
    """Prints one line, on rank 0 only."""
    if dist.get_rank() != 0:
        return
    pairs = [f"{k}={v:.9g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()]
    print(event, *pairs, flush=True)


def save(path, model, optimizer, epoch):
    """Writes what --resume needs. The file appears whole: a crash leaves the old one.

    Every rank must call it: rank 0 gathers the weights and the momentum of all stages.
    """
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    weights, momentum = state["model"], state["optimizer"]["state"]
    own_weights = {name: weight.cpu() for name, weight in weights.items() if not weight.is_meta}
    own_momentum = {
        number: {"momentum_buffer": one["momentum_buffer"].cpu()}
        for number, one in momentum.items()
        if not one["momentum_buffer"].is_meta
    }
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((own_weights, own_momentum), gathered)  # a collective
    if dist.get_rank() != 0:
        return
    for stage_weights, stage_momentum in gathered:
        weights.update(stage_weights)
        momentum.update(stage_momentum)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
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
    add("--batch-size", type=int, default=256, help="images per step, over all ranks [%(default)s]")
    add("--lr", type=float, default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=int, default=4, help="workers per loader, on each rank [%(default)s]")
    add("--seed", type=int, default=0, help="random seed [%(default)s]")
    add("--device", choices=["cpu", "cuda"], default=device, help="where to train [%(default)s]")
    add("--log-every", type=int, default=50, help="steps between log lines [%(default)s]")
    add("--save", type=Path, help="write a checkpoint to this file after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch, with its lr [none]")
    add("--micro-batches", type=int, default=4, help="parts of a batch [%(default)s]")
    orders = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    add("--schedule", choices=orders, default="1f1b", help="order of work on a rank [%(default)s]")
    args = parser.parse_args()
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


if __name__ == "__main__":
    main(parse_args())
    dist.destroy_process_group()  # after main(): DDP, which uses the group, is gone
