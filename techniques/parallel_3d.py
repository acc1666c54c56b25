"""3D parallelism on a mesh: stages of layers, groups of images, and shards of each layer.

torchrun --standalone --nproc-per-node 8 techniques/parallel_3d.py --arch vit_tiny
On several machines: --tensor-parallel at most the number of processes on one machine.
Without a GPU, on images that come with this project, add: --device cpu --dataset fashion-mnist
CIFAR-10, the default data set: `python snsc.py --epochs 0` downloads it. Run it on each machine.

Start reading at main(). All scripts of this project train on the same images, in the same order.
`diff -u techniques/parallel_2d.py techniques/parallel_3d.py` shows what it changes.
Left out on purpose: a learning-rate schedule, random resized crops, mixed precision,
and the parent's sequence parallelism.
"""

import argparse
import os
import shutil
import sys
import tempfile
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models
from torchvision.io import decode_image
from torchvision.transforms import v2


def main(args):
    # 0. processes and devices
    # torchrun starts --nproc-per-node copies of this script, and tells each one who it is. Where a
    # platform starts one process per container, LOCAL_RANK may be missing: it is 0.
    # The numbers in these comments are for 2 machines with 4 GPUs each.
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        sys.exit("start this script with torchrun, as its first lines show")
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # number on this machine: 0 to 3
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are: 8
    # Join the group of all processes. (A process is itself called a rank, after its number.)
    # In a collective, all ranks exchange data: all_reduce, broadcast, DDP's forward and backward.
    # Every rank must call every collective, in the same order. If one skips it, the others hang
    # until a timeout: 10 minutes with NCCL, 30 with Gloo.
    if args.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # otherwise "cuda" would be GPU 0 on every rank
        dist.init_process_group("nccl", device_id=device)  # device_id: NCCL connects now
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")  # for CPUs
    # With 8 ranks and 2 x 2 x 2, the mesh is [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]. Ranks 0 to 3 are
    # stage 0, with the first layers. As in parallel_2d.py, rows split the layers of a stage, and
    # columns split the images. Rank 0 sends its activations to rank 4, the same place in stage 1.
    # In a deep model, stages send less than rows. So they are the outermost dimension.
    ranks = args.pipeline_parallel * args.tensor_parallel
    if world_size % ranks:
        sys.exit(f"--pipeline-parallel x --tensor-parallel: {ranks} must divide {world_size}")
    shape = args.pipeline_parallel, world_size // ranks, args.tensor_parallel
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))
    row, rows = mesh.get_local_rank("data"), mesh.size(1)
    stage, num_stages = mesh.get_local_rank("pipeline"), mesh.size(0)
    torch.backends.cudnn.deterministic = True  # whole weights get equal gradients on all ranks

    # 1. data
    # The ranks of a row have the same images. Each row has different ones.
    local_batch_size, remainder = divmod(args.batch_size, rows)
    if remainder:
        sys.exit(f"--batch-size {args.batch_size}: must be a multiple of {rows} rows")
    if local_batch_size % args.micro_batches:
        sys.exit(f"--micro-batches {args.micro_batches}: must divide {local_batch_size} images")
    train_set, classes = load_dataset(args.dataset, args.data, args.image_size, train=True)
    test_set, test_classes = load_dataset(args.dataset, args.data, args.image_size, train=False)
    if classes != test_classes or any(name.startswith(".") for name in classes):
        sys.exit(f"--data {args.data}: train/ and val/ need equal class folders, no hidden ones")
    if args.batch_size > len(train_set):
        sys.exit(f"--batch-size {args.batch_size}: there are {len(train_set)} training images")
    if args.workers and len(tempfile.gettempdirb()) > 75:  # workers put sockets there
        sys.exit("TMPDIR is too long a path for loader workers, which would hang: set it to /tmp")
    # All ranks draw the same order as snsc.py. The ranks of row r take r, r + rows, ...
    sampler = DistributedSampler(train_set, rows, row, seed=args.seed, drop_last=True)
    loader_options = {
        "batch_size": local_batch_size,
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,  # keep them between epochs
        "pin_memory": args.device == "cuda",  # lets .to(device, non_blocking=True) return at once
    }
    # drop_last=True skips an incomplete last batch, so that all steps have the same batch size.
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loader_options)
    # Rows of one number, one in each stage, have the same images. A forward communicates only
    # between these, so they may have one batch more than others.
    test_indices = range(row, len(test_set), rows)
    test_loader = DataLoader(test_set, sampler=test_indices, **loader_options)

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
        scale_grads=True,  # the gradient of the batch is the mean over its micro-batches
    )
    # Only last stages have losses. With one rank of each row, every image is counted once.
    counts = stage == num_stages - 1 and mesh.get_local_rank("tensor") == 0
    # No DDP, whose documentation has no DTensors: average_gradients() runs after backward().
    torch.manual_seed(args.seed + stage * rows + row)  # for dropout: equal in a row

    # 3. optimizer
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        foreach=False,  # one by one: the faster ways cannot mix DTensors and tensors
    )

    # 4. resume
    first_epoch = 1
    if args.resume:
        # Every rank reads its shards: on several machines, put the folder where all of them see it.
        weights, momenta = get_state_dict(model, optimizer)
        checkpoint = {"model": weights, "optimizer": momenta, "epoch": 0}
        dcp.load(checkpoint, checkpoint_id=args.resume)  # fills in what is there
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momenta)
        first_epoch = checkpoint["epoch"] + 1
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        foreign = args.save.exists() and not (args.save / ".metadata").exists()
        if foreign or not os.access(args.save.parent, os.W_OK):
            sys.exit(f"--save {args.save}: must be new, or a checkpoint, in a writable folder")

    # 5. train
    log("start", world_size=world_size, classes=len(classes), **vars(args))
    augment_rng = torch.Generator()
    for epoch in range(first_epoch, args.epochs + 1):
        # The seeds depend only on --seed and the epoch, so a resumed run has the same batches.
        sampler.set_epoch(epoch)  # otherwise, all epochs would have the same order
        augment_rng.manual_seed(1_000_000 * (args.seed + 1) + epoch)  # never the shuffle's seed
        meter = Meter(device)
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            # All ranks draw the numbers of snsc.py: one row per image of the global batch.
            draws = torch.rand(args.batch_size, 3, generator=augment_rng)
            draws = draws[row::rows]  # those of this row's images: see the sampler
            draws = draws.to(device, non_blocking=True)  # too small to need pinned memory
            images = augment(images, draws)

            images = to_input(images, args.image_size)
            optimizer.zero_grad()
            losses = []  # of the micro-batches
            # Forward and backward of all micro-batches, with all sends and receives: every rank
            # must call it. The first stage uses the images; the last one labels, losses, logits.
            logits = schedule.step(images, target=labels, losses=losses)
            average_gradients(model, mesh["data"])  # over the ranks with the same shards
            optimizer.step()

            if counts:  # on the others, the sums of the meter stay 0
                meter.add(torch.stack(losses).mean(), logits, labels)
            if step % args.log_every == 0 or step == len(train_loader):
                metrics = meter.result()  # a collective: never under `if rank == 0`
                log("train", epoch=epoch, step=step, **metrics)
                meter = Meter(device)  # each line covers the steps since the last one

        # 6. evaluate
        sizes = local_batch_size, args.image_size
        metrics = evaluate(model, schedule, test_loader, device, *sizes, counts)
        log("eval", epoch=epoch, **metrics)
        if args.save:
            save(args.save, model, optimizer, epoch)  # a collective: never under `if rank == 0`

    # 7. finish
    log("end", peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20)  # rank 0's; CPU: 0


def load_dataset(name, folder, size, train):
    """The training or the test images, as uint8, and the names of the classes."""
    if name == "imagenet":  # photographs, in one folder per class
        crop = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
        data = datasets.ImageFolder(folder / ("train" if train else "val"), crop, loader=decode)
        return data, data.classes

    # The others fit into memory: images (N, 3, H, W), which to_input() resizes, and labels (N).
    if name == "cifar10":
        data = datasets.CIFAR10(folder, train)  # snsc.py downloads it
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
        """Mean loss, accuracy and speed over all ranks. Every rank must call it."""
        sums = self.sums.clone()  # a copy, since all_reduce overwrites its argument
        dist.all_reduce(sums)  # adds up the sums of all ranks
        loss, correct, images = sums.tolist()  # waits until the device is done
        seconds = time.perf_counter() - self.started
        return {
            "loss": loss / images,
            "accuracy": (correct + 0 * loss) / images,  # nan with a nan loss: argmax() picks NaN
            "images": int(images),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }


def log(event, **fields):
    """Prints one line, on rank 0 only. Nine digits, so that two runs can be compared exactly."""
    if dist.get_rank() != 0:
        return
    words = [event]
    for name, value in fields.items():
        words.append(f"{name}={value:.9g}" if isinstance(value, float) else f"{name}={value}")
    print(*words, flush=True)


def save(path, model, optimizer, epoch):
    """Writes what --resume needs: a folder, to which every rank writes its own shards."""
    temporary = path.with_name(path.name + ".part")
    weights, momenta = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": momenta, "epoch": epoch}
    try:
        dcp.save(state, checkpoint_id=temporary)  # a collective: returns when all have written
    except dcp.api.CheckpointException as error:  # of each rank
        shutil.rmtree(temporary, ignore_errors=True)  # it may have filled the disk
        sys.exit(f"{path}: not saved, is the disk full? {error}")
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
    add("--data", type=Path, default=Path("data"), help="folder of the data set [%(default)s]")
    add("--arch", default="resnet18", help="classification model of torchvision [%(default)s]")
    add("--image-size", type=int, help="pixels per side [224 for imagenet, else 32]")
    add("--epochs", type=int, default=5, help="passes over the training images [%(default)s]")
    add("--batch-size", type=int, default=256, help="images per step, over all ranks [%(default)s]")
    add("--lr", type=float, default=0.01, help="learning rate [%(default)s]")
    add("--workers", type=int, help="processes per loader [4 for imagenet or cuda, else 0]")
    add("--seed", type=int, default=0, help="random seed [%(default)s]")
    add("--device", choices=["cpu", "cuda"], default=device, help="where to train [%(default)s]")
    add("--log-every", type=int, default=50, help="steps between log lines [%(default)s]")
    add("--save", type=Path, help="write a checkpoint folder after every epoch [none]")
    add("--resume", type=Path, help="resume after this checkpoint's epoch; --lr is ignored [none]")
    add("--tensor-parallel", type=int, default=2, help="ranks that split a layer [%(default)s]")
    add("--pipeline-parallel", type=int, default=2, help="stages of layers [%(default)s]")
    add("--micro-batches", type=int, default=4, help="parts of a local batch [%(default)s]")
    args = parser.parse_args()
    if args.image_size is None:
        args.image_size = 224 if args.dataset == "imagenet" else 32
    if args.workers is None:
        args.workers = 4 if args.dataset == "imagenet" or args.device == "cuda" else 0
    return args


if __name__ == "__main__":
    main(parse_args())
    # DTensor's caches keep the group, and with it Gloo's threads, until Python ends. Python aborts
    # if a thread still frees a tensor then. So wait for a moment.
    time.sleep(0.1)
    dist.destroy_process_group()  # after main(), which uses the group to its end
