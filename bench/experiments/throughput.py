"""python -m bench throughput --out FILE: how fast one device trains, by how it computes.

For each size in --sizes (model:pixels:batch), all ways in --ways are built in one process: the
model, DDP's loss and SGD as in the scripts, and one batch of random images, which stays on the
device. So nothing is loaded, logged or sent: no training on this device can be faster. Each way has
its first turn as soon as it is ready; then all take turns, in random order. A way is a precision,
and what is added to it:

fp32, tf32, bf16, fp16   of convolutions; fp16 and bf16 by autocast, as techniques/amp.py does
+channels_last           weights and images in that memory layout
+compile                 torch.compile

FILE gets a line of JSON per turn: images/s, peak memory, and MFU, the share of the device's peak
FLOP/s (bench/flops.py). So what is cut off leaves its turns, and a way that has all of them is not
measured again.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision import models

from bench import UserError, records
from bench.flops import flops, peak
from bench.options import make_parser, positive

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
ADDED = ("channels_last", "compile")
SIZES = "resnet18:32:2048,resnet50:224:256,resnet18:32:256"
WAYS = "fp32,tf32,bf16,bf16+channels_last,bf16+channels_last+compile"
WARM_UP = 5  # steps: cuDNN times its algorithms, the compiler compiles


class Way:
    """A way to compute one model's steps on one batch, ready to take turns."""

    def __init__(self, name: str, arch: str, pixels: int, batch: int, device: str):
        self.precision, *added = name.split("+")
        self.device, self.batch = device, batch
        layout = torch.channels_last if "channels_last" in added else torch.contiguous_format
        torch.manual_seed(0)
        model = models.get_model(arch, num_classes=classes(pixels))
        model = model.to(device, memory_format=layout)
        images = torch.randint(256, (batch, 3, pixels, pixels), dtype=torch.uint8, device=device)
        self.images = ((images.float() - 128) / 64).to(memory_format=layout)
        self.labels = torch.randint(10, (batch,), device=device)
        self.optimizer = torch.optim.SGD(
            model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
        )
        self.scaler = torch.amp.GradScaler(device, enabled=self.precision == "fp16")
        self.forward = torch.compile(model) if "compile" in added else model

    def step(self) -> None:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        with torch.autocast(self.device, half, enabled=half is not None):
            loss = F.cross_entropy(self.forward(self.images), self.labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def seconds(self, steps: int) -> float:
        """Seconds of so many steps. TF32 is a switch of the whole process."""
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        wait(self.device)
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait(self.device)
        return time.perf_counter() - begun


def wait(device: str) -> None:
    """Waits until the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def prepare(name: str, size: tuple, device: str) -> tuple[Way, int, float | None]:
    """A way after its first steps, the steps of a second, and its peak memory in MiB on a GPU.

    The peak is of the step alone after its algorithms were chosen: choosing takes more.
    """
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    way = Way(name, *size, device)
    way.seconds(WARM_UP)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    each = way.seconds(2) / 2
    most = (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else None
    return way, max(1, round(1 / each)), most


def measure(size: tuple, names: list[str], args, note: Callable[[dict], None]) -> None:
    """Builds the ways of one size, gives each its turns, and notes a record of each turn."""
    arch, pixels, batch = size
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    about = {"size": ":".join(map(str, size)), "device_name": device, "torch": torch.__version__}
    whole, products = flops(arch, pixels, classes(pixels))
    ready: dict[str, tuple[Way, int, float | None]] = {}

    def turn(name: str) -> None:
        way, second, memory = ready[name]
        steps = max(1, round(args.seconds * second))
        speed = steps * batch / way.seconds(steps)
        most = peak([device], way.precision)
        # TF32 is for convolutions; by default, torch computes matrix products in fp32.
        counted = whole - products if way.precision == "tf32" else whole
        found = {"way": name, "time": time.time(), "images_per_second": speed}
        found |= {"mfu": counted * speed / most if most else None, "peak_memory_mib": memory}
        note(about | found)

    for name in names:
        try:
            ready[name] = prepare(name, size, args.device)
        except Exception as error:  # out of memory, or no compiler: a row with its reason
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            note(about | {"way": name, "failed": reason})
        else:
            turn(name)
    for _ in range(args.turns - 1):
        for name in random.sample([*ready], len(ready)):
            turn(name)


def classes(pixels: int) -> int:
    """How many classes the model has: ImageNet's, or CIFAR-10's."""
    return 1000 if pixels == 224 else 10


def parse_sizes(text: str) -> list[tuple[str, int, int]]:
    """--sizes as (model, pixels, batch). Raises UserError."""
    found = []
    for part in text.split(","):
        try:
            arch, pixels, batch = part.split(":")
            found.append((arch, int(pixels), int(batch)))
        except ValueError:
            raise UserError(f"--sizes {part}: give model:pixels:batch, as {SIZES}") from None
    return found


def main(argv: list[str]) -> int:
    """The command."""
    parser = make_parser("throughput", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON lines, appended to")
    add("--sizes", default=SIZES, help="model:pixels:batch, with commas [%(default)s]")
    add("--ways", default=WAYS, help="with commas [%(default)s]")
    add("--turns", type=positive(int), default=5, help="of each way [%(default)s]")
    add("--seconds", type=positive(float), default=0.5, help="of a turn [%(default)s]")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=device, help="[%(default)s]")
    args = parser.parse_args(argv)
    names = args.ways.split(",")
    for name in names:
        first, *added = name.split("+")
        if first not in PRECISIONS or not set(added) <= set(ADDED):
            raise UserError(f"--ways {name}: a precision, then of {','.join(ADDED)}: {WAYS}")
    torch.backends.cudnn.benchmark = True
    known = Counter((line["size"], line["way"]) for line in records.lines(args.out)[0])

    def note(record: dict) -> None:
        text = json.dumps(record)
        print(text, flush=True)
        with open(args.out, "a") as file:
            file.write(text + "\n")

    for size in parse_sizes(args.sizes):
        label = ":".join(map(str, size))
        if left := [name for name in names if known[label, name] < args.turns]:
            measure(size, left, args, note)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    return 0
