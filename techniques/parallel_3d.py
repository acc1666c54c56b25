"""3D parallelism on a mesh: stages of layers, groups of images, and shards of each layer.

torchrun --standalone --nproc-per-node 8 techniques/parallel_3d.py --arch vit_tiny
On several machines: --tensor-parallel as many as the processes of one, or fewer.
Without a GPU, on images that come with this project, add: --device cpu --dataset fashion-mnist
The default data set, CIFAR-10, is downloaded by snsc.py: run it first, on each machine.

Start reading at main(). The scripts of this project differ only where the parallelism does: see
`diff -u techniques/parallel_2d.py techniques/parallel_3d.py`.
They train on the same batches with the same augmentation.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision,
and the parent's sequence parallelism.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


def main(args):
    # 0. processes and devices
    # torchrun starts --nproc-per-node copies of this script, and tells each one who it is.
    if "RANK" not in os.environ:
        sys.exit("start this script with torchrun, as its first lines show")
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
    # With 8 ranks and 2 x 2 x 2, the mesh is [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]. Ranks 0 to 3 are
    # stage 0, which has the first layers, a parallel_2d.py of its own: rows split the layers, and
    # columns the images. Rank 0 sends its activations to rank 4, the same place in stage 1.
    # In a large model, stages send least. So they are the outermost dimension: between machines.
    ranks = args.pipeline_parallel * args.tensor_parallel
    if world_size % ranks:
        sys.exit(f"--pipeline-parallel x --tensor-parallel: {ranks} must divide {world_size}")
    shape = args.pipeline_parallel, world_size // ranks, args.tensor_parallel
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))
    row, rows = mesh.get_local_rank("data"), mesh.size(1)
    stage, num_stages = mesh.get_local_rank("pipeline"), mesh.size(0)
    torch.backends.cudnn.benchmark = True  # try cuDNN's algorithms for a shape, keep the fastest

    # 1. data
    # The ranks of a row have the same images, another row has others.
    local_batch_size, remainder = divmod(args.batch_size, rows)
    if remainder:
        sys.exit(f"--batch-size {args.batch_size}: must be a multiple of {rows} groups")
    if local_batch_size % args.micro_batches:
        sys.exit(f"--micro-batches {args.micro_batches}: must divide {local_batch_size} images")
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes:
        sys.exit(f"--data {args.data}: train/ and val/ have different class folders")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    # All ranks draw the same order, that of snsc.py. The ranks of row r take r, r + rows, ...
    sampler = DistributedSampler(train_set, rows, row, seed=args.seed, drop_last=True)
    train_loader = make_loader(
        train_set, sampler, local_batch_size, device, args.workers, drop_last=True
    )
    # Rows of one number, one in each stage, have the same images. A forward communicates only
    # between these, so they may have one batch more than others.
    test_indices = range(row, len(test_set), rows)
    test_loader = make_loader(test_set, test_indices, local_batch_size, device, args.workers)

    # 2. model
    torch.manual_seed(args.seed)
    if args.arch == "vit_tiny":  # patches of 4 x 4, 4 layers, 4 heads, width 128, in the MLP 256
        model = models.VisionTransformer(args.image_size, 4, 4, 4, 128, 256, 0, 0, len(classes))
    else:
        model = models.get_model(args.arch, num_classes=len(classes))
    if not isinstance(model, models.VisionTransformer):
        sys.exit(f"--arch {args.arch}: give a vision transformer, such as vit_tiny or vit_b_16")
    heads = model.encoder.layers[0].num_heads
    if heads % args.tensor_parallel:
        sys.exit(f"--tensor-parallel {args.tensor_parallel}: must divide {heads} heads")
    # A layer's weights become DTensors, of which this rank has a shard. Colwise: split by outputs.
    # Rowwise: by inputs, and the outputs are summed over the ranks. In between, tensors are local.
    plan = {
        "self_attention.query": ColwiseParallel(),
        "self_attention.key": ColwiseParallel(),
        "self_attention.value": ColwiseParallel(),
        "self_attention.out_proj": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.3": RowwiseParallel(),
    }
    depth = len(model.encoder.layers)
    if num_stages > depth:
        sys.exit(f"--pipeline-parallel {num_stages}: --arch {args.arch} has {depth} blocks")
    part = Stage(model, stage, num_stages)  # leaves in model only what this stage needs
    for block in model.encoder.layers:
        block.self_attention = Attention(block.self_attention)
        parallelize_module(block, mesh["tensor"], plan)  # a collective: rank 0 sends shards
    model.to(device)  # only what this rank keeps
    schedule = Schedule1F1B(
        PipelineStage(part, stage, num_stages, device, group=mesh.get_group("pipeline")),
        args.micro_batches,
        loss_fn=F.cross_entropy,
        scale_grads=True,  # the gradient of the batch is the mean of those of its micro-batches
    )
    # Only last stages have losses. With one rank of each row, every image is counted once.
    counts = stage == num_stages - 1 and mesh.get_local_rank("tensor") == 0
    # No DDP, which knows no DTensors: average_gradients() runs after backward().
    # The seed stays the same on all ranks: dropout would have to drop the same numbers.

    # 3. optimizer
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        foreach=False,  # one by one: the faster ways take no mix of DTensors and tensors
    )

    first_epoch = 1
    if args.resume:
        # Every rank reads its shards: on several machines, put the folder where all of them see it.
        weights, momenta = get_state_dict(model, optimizer)
        checkpoint = {"model": weights, "optimizer": momenta, "epoch": 0}
        dcp.load(checkpoint, checkpoint_id=args.resume)  # fills in what is there
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momenta)
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
            # All ranks draw the same numbers: one row per image of the global batch, as in snsc.py.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws[row::rows]  # image k of the global batch is in row k % rows
            images = augment(images, draws.to(device, non_blocking=True))

            optimizer.zero_grad()
            losses = []  # of the micro-batches
            # Forward and backward of all micro-batches, with all sends and receives: every rank
            # must call it. The first stage uses the images; the last one labels, losses, logits.
            logits = schedule.step(to_input(images, args.image_size), target=labels, losses=losses)
            average_gradients(model, mesh["data"])  # over the ranks with the same shards
            optimizer.step()

            if counts:  # on the others, the sums of the meter stay 0
                meter.add(torch.stack(losses).mean(), logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()  # a collective: never under `if rank == 0`
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)

        # 5. evaluate
        sizes = local_batch_size, args.image_size
        metrics = evaluate(model, schedule, test_loader, device, *sizes, counts)
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


class Attention(nn.Module):
    """This rank's heads of an nn.MultiheadAttention. Every rank must call it."""

    def __init__(self, whole):
        super().__init__()
        # ColwiseParallel splits an nn.Linear, so in_proj becomes three.
        weights, biases = whole.in_proj_weight.data.chunk(3), whole.in_proj_bias.data.chunk(3)
        for name, weight, bias in zip(["query", "key", "value"], weights, biases, strict=True):
            linear = nn.Linear(whole.embed_dim, whole.embed_dim, device="meta")
            linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
            self.add_module(name, linear)
        self.out_proj = whole.out_proj
        self.head_dim = whole.head_dim

    def forward(self, x, *_, need_weights):  # as torchvision calls it: x is query, key and value
        query, key, value = [
            linear(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]  # each (N, this rank's heads, tokens, head_dim)
        x = F.scaled_dot_product_attention(query, key, value)  # no head needs another one
        x = x.transpose(1, 2).flatten(2)  # (N, tokens, this rank's heads side by side)
        return self.out_proj(x), None  # None: no attention weights


class Stage(nn.Module):
    """This stage's part of torchvision's VisionTransformer. Deletes the other parts of it."""

    def __init__(self, model, stage, num_stages):
        super().__init__()
        self.model, self.first, self.last = model, stage == 0, stage == num_stages - 1
        blocks = model.encoder.layers
        depth = len(blocks)
        for number, name in enumerate([name for name, _ in blocks.named_children()]):
            if number * num_stages // depth != stage:
                delattr(blocks, name)  # the others keep their names
        if not self.first:
            del model.conv_proj, model.class_token, model.encoder.pos_embedding
        if not self.last:
            del model.encoder.ln, model.heads

    def forward(self, x):
        if self.first:
            x = self.model._process_input(x)  # patches as tokens
            x = torch.cat([self.model.class_token.expand(len(x), -1, -1), x], dim=1)
            x = self.model.encoder.dropout(x + self.model.encoder.pos_embedding)
        x = self.model.encoder.layers(x)
        return self.model.heads(self.model.encoder.ln(x)[:, 0]) if self.last else x


def average_gradients(model, mesh):
    """Gives the ranks of a mesh the mean of their gradients. Every rank must call it."""
    for weight in model.parameters():
        gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        dist.all_reduce(gradient, group=mesh.get_group())
        gradient /= mesh.size()


@torch.no_grad()
def evaluate(model, schedule, loader, device, batch_size, size, counts):
    """Mean loss and accuracy over the images of all rows. Every rank must call it."""
    model.eval()
    meter = Meter(device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # The stages expect micro-batches of one shape: fill up the last batch with gray images.
        missing = batch_size - len(labels)
        inputs = F.pad(to_input(images, size), [0, 0, 0, 0, 0, 0, 0, missing])
        logits = schedule.eval(inputs, target=F.pad(labels, [0, missing]))
        if counts:  # this rank has the last stage
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
    """Writes what --resume needs: a folder, to which every rank writes its own shards."""
    temporary = path.with_name(path.name + ".part")
    weights, momenta = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": momenta, "epoch": epoch}
    dcp.save(state, checkpoint_id=temporary)  # a collective: returns when all have written
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)  # a crash after this leaves .part, which is whole
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
    add("--save", type=Path, help="write a checkpoint folder after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch, with its lr [none]")
    add("--tensor-parallel", type=int, default=2, help="ranks that split a layer [%(default)s]")
    add("--pipeline-parallel", type=int, default=2, help="stages of layers [%(default)s]")
    add("--micro-batches", type=int, default=4, help="parts of a local batch [%(default)s]")
    args = parser.parse_args()
    args.image_size = args.image_size or (224 if args.dataset == "imagenet" else 32)
    return args


if __name__ == "__main__":
    main(parse_args())
    # DTensor's caches keep the group, and with it Gloo's threads, until Python ends. Python aborts
    # if one of them still frees a tensor then. So give them a moment.
    time.sleep(0.1)
    dist.destroy_process_group()  # after main(): DDP, which uses the group, is gone
