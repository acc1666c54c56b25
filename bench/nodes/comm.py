"""python -m bench comm: how fast the ranks' collectives are, from 1 KB to 256 MB.

    python -m bench comm --ranks 2                               starts two ranks on this machine
    torchrun --nnodes 2 --node-rank 0 ... -m bench comm          on each of several machines
    srun --ntasks-per-node=1 python -m bench comm                in a Slurm job

Each result is compared with the values that it must have. Size, algorithm bandwidth and bus
bandwidth are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). A size is
rounded up to a multiple of the ranks; the table and FILE have what was sent. The fit is
seconds = latency + bus bytes / bandwidth, with 95% intervals by bootstrap over the repeats; a bus
byte is one that a ring sends over each link. At last, matrix products show how much a device
computes during an all-reduce. FILE gets JSON lines, and a plot beside it. Needs only
PyTorch; the plot also needs matplotlib, and --read makes it later. Exit code 1: a wrong result.
"""

import argparse
import json
import math
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns of names without need

import torch
import torch.distributed as dist

from . import options
from .facts import slurms_choice
from .fit import UNSEEN, Fit, ends, fit
from .ranks import start

SIZES = [2**10 * 4**k for k in range(10)]  # bytes: 1 KB to 256 MB
FACTORS = {  # bus bytes of a byte, on n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
}
FEWEST, MOST, ENOUGH = 5, 15, 0.5  # repeats of a size; no more after so many seconds
REPEAT = 0.01  # seconds: a repeat is so many calls in a row
DRAWS = 200  # of the bootstrap
refuse = partial(options.refuse, "comm")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options.make_parser("comm", __doc__)
    add, gpus = parser.add_argument, torch.cuda.device_count()
    add("--ranks", type=int, default=gpus or 2, help="to start here [one per GPU, or 2]")
    add("--backend", choices=["gloo", "nccl"], default="nccl" if gpus else "gloo")
    add("--out", type=Path, default=Path("comm.jsonl"), metavar="FILE", help="[%(default)s]")
    text = "for all of it; sizes that would take longer are left out, and named [%(default)s]"
    add("--seconds", type=float, default=120, help=text)
    add("--read", type=Path, metavar="FILE", help="only show the table and the plot of this file")
    args = parser.parse_args(argv)
    if args.seconds <= 0:
        refuse(f"--seconds {args.seconds:g}: must be above 0")
    if (path := args.read or args.out).suffix.lower() == ".png":
        refuse(
            f"{'--read' if args.read else '--out'} {path}: the plot gets this name: end in .jsonl"
        )
    if not args.read and not args.out.parent.is_dir():
        refuse(f"--out {args.out}: there is no folder {args.out.parent}")
    return args


# --- the ranks


def place(backend: str) -> bool:
    """Sets torchrun's variables by Slurm's; False where neither has started this process."""
    env = os.environ
    if "RANK" not in env and "SLURM_STEP_NODELIST" in env and env["SLURM_STEP_NUM_TASKS"] != "1":
        host, port = slurms_choice()
        env |= {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"]}
        env["LOCAL_RANK"] = env["SLURM_LOCALID"]
        env.setdefault("MASTER_ADDR", host)
        env.setdefault("MASTER_PORT", str(port))
    if backend == "nccl" and "RANK" in env and int(env["LOCAL_RANK"]) >= torch.cuda.device_count():
        refuse(f"--backend nccl: needs a GPU per rank, there are {torch.cuda.device_count()}")
    if env.get("WORLD_SIZE") == "1":
        refuse("--nproc-per-node: one rank has nothing to send: start 2 or more")
    return "RANK" in env


# --- measuring


def prepare(name: str, count: int, rank: int, n: int, device: torch.device):
    """A collective on this many float32: what runs it, the tensor it changes, and what that must
    be. Whole numbers, whose sums are exact; each rank has others, and so has each place.
    """
    ramp = (torch.arange(count, device=device, dtype=torch.int32) % 1000).float()
    mine = slice(rank * count // n, (rank + 1) * count // n)
    total = ramp * n + n * (n - 1) // 2
    if name == "all_reduce":
        out = ramp + rank
        return partial(dist.all_reduce, out), out, total
    if name == "all_gather":
        owner = torch.arange(n, device=device).repeat_interleave(count // n)
        out = torch.zeros_like(ramp)
        return partial(dist.all_gather_into_tensor, out, ramp[mine] + rank), out, ramp + owner
    if name == "reduce_scatter":
        out = torch.zeros_like(ramp[mine])
        return partial(dist.reduce_scatter_tensor, out, ramp + rank), out, total[mine]
    out = ramp + 1 if rank == 0 else torch.zeros_like(ramp)
    return partial(dist.broadcast, out, 0), out, ramp + 1


def largest(values: list[float], device: torch.device) -> list[float]:
    """Collective: of each number the largest of all ranks, equal on all of them."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def timed(call: Callable[[], None], device: torch.device, times: int = 1) -> float:
    """Collective: seconds of a call on the slowest rank."""
    largest([0], device)  # all are here
    begun = time.perf_counter()
    for _ in range(times):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return largest([(time.perf_counter() - begun) / times], device)[0]


def measure(name: str, size: int, device: torch.device) -> dict:
    """Collective: the record of a size. Before each repeat, a call of its own is checked: `right`
    means on this rank.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    count = math.ceil(size / 4 / n) * n
    call, out, right = prepare(name, count, rank, n, device)
    first, wrong, spent, times = out.clone(), False, [], 1
    while len(spent) <= FEWEST or (len(spent) <= MOST and times * sum(spent[1:]) < ENOUGH):
        out.copy_(first)
        call()
        wrong = wrong or not out.equal(right)
        if name == "all_reduce":
            out.zero_()  # its sums would grow from call to call
        spent.append(timed(call, device, times))
        if len(spent) == 1:  # only to see how long it takes
            times = max(1, min(50, int(REPEAT / spent[0])))
    found = {"kind": "size", "collective": name, "bytes": 4 * count, "seconds": spent[1:]}
    return found | {"right": not wrong}


def overlaps(size: int, device: torch.device) -> dict:
    """Collective: in which part of an all-reduce's time a device goes on computing, by repeats.
    Both at once take less than one after the other: by so much of the shorter of the two.
    """
    numbers, side = torch.zeros(size // 4, device=device), 256 if device.type == "cpu" else 2048
    matrix, count = torch.rand(side, side, device=device), 10

    def compute() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    def both() -> None:
        work = dist.all_reduce(numbers, async_op=True)
        compute()
        work.wait()

    send = partial(dist.all_reduce, numbers)
    timed(compute, device)
    count = max(1, round(count * timed(send, device) / timed(compute, device)))
    found = []
    for _ in range(MOST):
        sent, computed, together = (timed(each, device) for each in (send, compute, both))
        hidden = (sent + computed - together) / min(sent, computed)
        found.append(min(1.0, max(0.0, hidden)))
    return {"kind": "overlap", "bytes": size, "overlaps": found}


def begin(backend: str, limit: float) -> tuple[torch.device, dict]:
    """Collective: joins the group; the device, and the record of what is measured."""
    device, name = torch.device("cpu"), "cpu"
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name()
    dist.init_process_group(backend, timeout=timedelta(seconds=limit + 60))
    hosts: list = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, (socket.gethostname(), os.environ.get("GROUP_RANK")))
    about = {"backend": backend, "ranks": len(hosts), "nodes": len(set(hosts)), "device": name}
    return device, {"kind": "setting", **about, "torch": torch.__version__, "time": time.time()}


def measure_all(backend: str, limit: float, begun: float) -> list[dict]:
    """Collective: all records; those of rank 0 count."""
    device, setting = begin(backend, limit)
    found, rates = [setting], {}  # rates: seconds per byte of each collective

    def left() -> float:
        return limit - largest([time.monotonic() - begun], device)[0]

    for size in SIZES:
        for name in FACTORS:
            needs, have = 2 * (FEWEST + 1) * size * rates.get(name, 0), left() - 0.15 * limit
            if needs > have:
                record = {"kind": "left out", "collective": name, "bytes": size}
                found.append(record | {"needs": needs, "left": have})
                continue
            record = measure(name, size, device)
            record["right"] = not largest([not record["right"]], device)[0]
            found.append(record)
            rates[name] = median(record["seconds"]) / size
    if "all_reduce" not in rates:  # of the start: rank 0 says so before torchrun ends it
        if dist.get_rank() == 0:
            print(
                f"comm: --seconds {limit:g}: all went by at the start: give more", file=sys.stderr
            )
        dist.barrier()
        dist.destroy_process_group()  # Gloo's threads, left running, may abort the process
        sys.exit(2)
    # The largest size of a bucket of DDP's for which the rest is enough.
    per_byte, have = 3 * MOST * rates["all_reduce"], left()
    sizes = [x for x in SIZES if 2**20 <= x <= 2**24 and x * per_byte < have]
    found += [overlaps(sizes[-1], device)] if sizes else []
    dist.destroy_process_group()
    return found


# --- latency and bandwidth


def fits(lines: list[dict], name: str = "all_reduce") -> tuple[Fit, list[Fit]]:
    """The fit of a collective's medians, and the fits of bootstrap samples of its repeats."""
    factor = FACTORS[name](lines[0]["ranks"])
    mine = [x for x in lines if x["kind"] == "size" and x["collective"] == name]
    dice = random.Random(0)

    def points(draw: Callable) -> list:
        return [(factor * x["bytes"], median(draw(x["seconds"]))) for x in mine]

    samples = (points(lambda s: dice.choices(s, k=len(s))) for _ in range(DRAWS))
    return fit(points(list)), [*map(fit, samples)]


def fit_records(lines: list[dict]) -> list[dict]:
    """A line for each collective; misfit: the largest relative error of the fit."""
    found = []
    for name in FACTORS:
        mine = [x for x in lines if x["kind"] == "size" and x["collective"] == name]
        if len(mine) < 2:
            continue
        (latency, bandwidth), samples = fits(lines, name)
        bus = FACTORS[name](lines[0]["ranks"]) / bandwidth
        off = [(latency + bus * x["bytes"]) / median(x["seconds"]) - 1 for x in mine]
        record = {"kind": "fit", "collective": name, "latency": latency, "bandwidth": bandwidth}
        record["latency_ends"] = ends([a for a, _ in samples])
        record["bandwidth_ends"] = ends([b for _, b in samples])
        found.append(record | {"misfit": max(off, key=abs)})
    return found


def read(path: Path) -> list[dict]:
    """The lines of a file of this command. Raises ValueError where it is none."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or lines[0].get("kind") != "setting" or "ranks" not in lines[0]:
        raise ValueError("no line about ranks and backend comes first")
    return lines


# --- showing


def human(size: int) -> str:
    return next(f"{size / u:.3g} {n}" for u, n in [(2**20, "MB"), (2**10, "KB")] if size >= u)


def show(lines: list[dict]) -> None:
    """Prints the table, and the fits."""
    first, by_size = lines[0], {}
    for x in lines:
        if x["kind"] == "size":
            by_size.setdefault(x["bytes"], {})[x["collective"]] = x
    print("{backend}, ranks: {ranks}, nodes: {nodes}, {device}, torch {torch}".format(**first))
    print("ms, algorithm bandwidth and bus bandwidth in GB/s:")
    print(f"{'size':>7}" + "".join(f"{name:>28}" for name in FACTORS))
    for size, found in sorted(by_size.items()):
        cells = []
        for name in FACTORS:
            x = found.get(name)
            t = median(x["seconds"]) if x else 0
            rate = x["bytes"] / t / 1e9 if x else 0
            text = f"{1e3 * t:.3g}  {rate:.3g}  {rate * FACTORS[name](first['ranks']):.3g}"
            cells.append("" if not x else text if x["right"] else "WRONG")
        print(f"{human(size):>7}" + "".join(f"{cell:>28}" for cell in cells).rstrip())
    for x in (x for x in lines if x["kind"] == "fit"):
        a, b = x["latency_ends"], x["bandwidth_ends"]
        text = f"{x['collective']}: latency {1e6 * x['latency']:.3g} us [{1e6 * a[0]:.3g}, "
        text += f"{1e6 * a[1]:.3g}], bandwidth "
        if x["bandwidth"] > UNSEEN:
            text += "not seen: the times don't grow with the sizes"
        else:
            text += f"{x['bandwidth'] / 1e9:.3g} GB/s [{b[0] / 1e9:.3g}, {b[1] / 1e9:.3g}]"
        print(f"{text}; at most {abs(x['misfit']):.0%} off")
    for x in (x for x in lines if x["kind"] == "overlap"):
        print(f"computing goes on in {median(x['overlaps']):.0%} of an all-reduce's time")
    for name in FACTORS:
        left = [x for x in lines if x["kind"] == "left out" and x["collective"] == name]
        if left:
            sizes = ", ".join(human(x["bytes"]) for x in left)
            print(f"{name}: left out, --seconds would not suffice: {sizes}")


def empty_plot():
    """A figure in the benchmark's style, and its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    from bench.show import style

    matplotlib.rcParams |= style.STYLE
    figure = Figure(figsize=style.FREE, layout="constrained")
    return figure, figure.subplots()


def save_plot(figure, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=120)
    part.replace(path)


def draw(lines: list[dict], path: Path) -> None:
    """Writes the plot: bus bandwidth against size, and the fits as lines."""
    from bench.show import style

    (figure, axes), n = empty_plot(), lines[0]["ranks"]
    looks = zip(FACTORS, "osD^", [style.BLUE, style.ORANGE, style.GREEN, style.PINK], strict=True)
    for name, mark, colour in looks:
        mine = [x for x in lines if x["kind"] == "size" and x["collective"] == name]
        sizes = [x["bytes"] for x in mine]
        bus = [x["bytes"] * FACTORS[name](n) / 1e9 for x in mine]
        low, middle, high = (
            [b / end(x["seconds"]) for b, x in zip(bus, mine, strict=True)]
            for end in (max, median, min)
        )
        axes.plot(sizes, middle, mark, ms=4, color=colour, label=name)
        axes.vlines(sizes, low, high, lw=0.8, color=colour)
        for x in (x for x in lines if x["kind"] == "fit" and x["collective"] == name):
            curve = [b / (x["latency"] + b * 1e9 / x["bandwidth"]) for b in bus]
            axes.plot(sizes, curve, lw=1, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    axes.set_title("{backend}, ranks: {ranks}, nodes: {nodes}, with the fit".format(**lines[0]))
    axes.grid(True)
    figure.legend(loc=style.BELOW, ncols=4)
    save_plot(figure, path)


def report(lines: list[dict], path: Path) -> int:
    """Prints the table and writes the plot, where there is what that needs; the exit code."""
    show(lines)
    try:
        draw(lines, path.with_suffix(".png"))
    except ImportError as error:
        print(f"comm: without {error.name} there is no plot; --read {path} makes it elsewhere")
    wrong = [x for x in lines if x["kind"] == "size" and not x["right"]]
    for x in wrong:
        print(f"comm: {x['collective']} of {human(x['bytes'])}: WRONG VALUES", file=sys.stderr)
    return int(bool(wrong))


def main(argv: list[str]) -> int:
    begun = time.monotonic()
    args = parse(argv)
    if args.read:
        try:
            return report(read(args.read), args.read)
        except (OSError, ValueError) as error:
            refuse(f"--read {args.read}: {error}: give a file that comm wrote")
    if not place(args.backend):
        if args.ranks < 2:
            refuse(f"--ranks {args.ranks}: a collective needs 2; or start it on several machines")
        if args.backend == "nccl" and args.ranks > (count := torch.cuda.device_count()):
            refuse(f"--ranks {args.ranks}: there are {count} GPUs: fewer, or --backend gloo")
        return start(args.ranks, main, argv)
    lines = measure_all(args.backend, args.seconds, begun)
    if os.environ["RANK"] != "0":
        return 0
    lines += fit_records(lines)
    part = args.out.with_name(args.out.name + ".part")
    part.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    part.replace(args.out)
    return report(lines, args.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
