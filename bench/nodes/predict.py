"""python -m bench predict: what a DDP training would reach on N GPUs or machines.

    python -m bench predict comm.jsonl --arch resnet18 --batch 64 --step-ms 210
    python -m bench predict inside.jsonl between.jsonl --result logs/runs/DIR --per-node 8
    python -m bench predict --measured 1:367,8:2888 --ranks 16,32 --per-node 8

The first two forms take one device's step (--step-ms, or --result, a folder of `bench run`), the
links that `bench comm` has measured, and DDP's buckets, which backward() fills and all-reduces one
after the other: by a ring within a node, then by a ring over the nodes. The third form takes two
measured speeds: what the ranks lose grows as a ring's bytes within a node, and by as much again
with each doubling of the nodes. docs/howto/predict.md says what the intervals have in them, and
when not to trust them.
"""

import json
import math
import random
import sys
from functools import partial
from pathlib import Path
from statistics import fmean, median

from bench import UserError, data, records
from bench.ladder import DDP
from bench.nodes import comm, fit
from bench.options import make_parser, positive

FIRST, CAP = 2**20, 25 * 2**20  # bytes of DDP's first bucket and of the others, at least
FORWARD = 1 / 3  # of a step: backward() does twice forward's operations
DRAWS, SEED = 400, 0
NOISE = 0.03  # standard deviation of a speed in one run. Our choice
ERROR = 0.05  # the same for two speeds: with it, 9 of 10 published speeds are in their intervals
WORTH = 0.95  # the efficiency at which we say that communication hides. Our choice
Gradient = tuple[int, float]  # bytes, and the share of backward() after which it is ready
Link = tuple[float, float]  # seconds that a message takes between two ranks, and bytes/s


# --- DDP's step, from its parts


def gradients(arch: str, pixels: int, classes: int) -> list[Gradient]:
    """A torchvision model's gradients in the order of backward(), by the layers' operations."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision import models

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = models.get_model(arch, num_classes=classes).eval()
        model(torch.empty(1, 3, pixels, pixels))
    counts = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    done, found = 0, []
    for name, weight in reversed([*model.named_parameters()]):
        done += counts.pop(f"{type(model).__name__}.{name.rpartition('.')[0]}", 0)
        found.append((weight.numel() * 4, done / counts["Global"]))
    return [*found[:-1], (found[-1][0], 1.0)]


def evenly(parameters: float) -> list[Gradient]:
    """Gradients of so many parameters in equal pieces, ready one after the other."""
    count = math.ceil(parameters * 4 / FIRST)
    return [(round(parameters * 4 / count), (k + 1) / count) for k in range(count)]


def buckets(found: list[Gradient]) -> list[Gradient]:
    """DDP's buckets: each is closed by the gradient that fills it, and is ready with it."""
    made, size, limit = [], 0, FIRST
    for bytes_, ready in found:
        size += bytes_
        if size >= limit:
            made.append((size, ready))
            size, limit = 0, CAP
    return [*made, (size, 1.0)] if size else made


def ring(ranks: int, size: float, link: Link) -> float:
    """Seconds of a ring all-reduce: 2(N-1) messages, one after the other, of size/N bytes each."""
    return 2 * (ranks - 1) * (link[0] + size / ranks / link[1])


def all_reduce(size: float, ranks: int, per_node: int, inside: Link, between: Link) -> float:
    """Seconds of an all-reduce: a ring within each node, and one over the nodes."""
    nodes, local = math.ceil(ranks / per_node), min(ranks, per_node)
    return ring(local, size, inside) + ring(nodes, size, between)


def step(single: float, parts: list[Gradient], seconds, overlap: float) -> float:
    """Seconds of DDP's step. single: one device's; seconds: of the all-reduce of so many bytes;
    overlap: the part of an all-reduce's time in which backward() goes on computing.
    """
    backward = single * (1 - FORWARD)
    clock = computed = 0.0  # seconds since backward() began, and what it has done of its own
    for size, ready in parts:
        wait = max(0.0, ready * backward - computed)
        clock, computed = clock + wait, computed + wait
        spent = seconds(size)
        clock, computed = clock + spent, min(backward, computed + overlap * spent)
    return single - backward + clock + backward - computed


def hides(single: float, parts: list[Gradient], seconds, overlap: float) -> float:
    """By how much a step's computing must grow so that its efficiency is WORTH."""
    low, high = 1e-4, 1e4
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        one = single * middle
        good = one / step(one, parts, seconds, overlap) >= WORTH
        low, high = (low, middle) if good else (middle, high)
    return high


# --- from two measured speeds


def growth(ranks: int, per_node: int) -> tuple[float, float, float]:
    """How what ranks lose grows with their number: least, expected, most. No unit."""
    nodes, local = max(1, ranks / per_node), min(ranks, per_node)
    share = (local - 1) / local
    return 1 + math.log2(nodes), share * (1 + math.log2(nodes)), math.log2(local) * nodes


def fitted(
    one: float, ranks: int, speed: float, wanted: int, per_node: int, error: float = ERROR
) -> tuple:
    """Images/s of the wanted ranks, and the interval's ends, from those of one and of `ranks`."""

    def reached(one: float, speed: float, weight: float) -> float:
        lost = max(0.0, one * ranks / speed - 1)  # of one device's step: no rank gains by others
        # weight: -1 is the least growth, 0 the expected one, 1 the most
        least, expected, most = (
            a / b for a, b in zip(growth(wanted, per_node), growth(ranks, per_node), strict=True)
        )
        grown = expected + abs(weight) * ((most if weight > 0 else least) - expected)
        return one * wanted / (1 + lost * grown)

    dice = random.Random(SEED)

    def noisy(x: float) -> float:
        return x * math.exp(dice.gauss(0, error))

    samples = [reached(noisy(one), noisy(speed), dice.uniform(-1, 1)) for _ in range(DRAWS)]
    return reached(one, speed, 0), *comm.ends([noisy(x) for x in samples])


# --- the command


def links(paths: list[Path]) -> tuple[dict[str, list[Link]], list[float]]:
    """The links "inside" a node and "between" nodes, each as the fit and its samples; and comm's
    measurements of the overlap, of the file where it is less.
    """
    found, overlaps = {}, [1.0]
    for path in paths:
        try:
            lines = comm.read(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {error}: give a file that comm wrote") from None
        last = [x for x in lines if x["kind"] == "size" and x["collective"] == "all_reduce"]
        if len(last) < 2:
            raise UserError(f"{path}: has no two sizes of all_reduce: give comm more --seconds")
        middle, samples = comm.fits(lines)
        if middle[1] > fit.UNSEEN:
            raise UserError(f"{path}: times don't grow with the sizes: give comm more --seconds")
        hops = 2 * (lines[0]["ranks"] - 1)
        where = "between" if lines[0]["nodes"] > 1 else "inside"
        found[where] = [(a / hops, b) for a, b in (middle, *samples)]
        each = [x["overlaps"] for x in lines if x["kind"] == "overlap"]
        overlaps = min([overlaps, *each], key=median)
    return found, overlaps


def from_result(folder: Path) -> tuple[dict, list[float], dict[int, float]]:
    """Of a folder of `bench run`: its plan, one device's images/s by block, and DDP's by ranks."""
    from bench.show.summary import Run, log_speeds, timed

    run = Run.of(folder)
    rows = [row for row in timed(run.rows) if row["script"] == DDP and not row["technique"]]
    speeds = {row["world"]: row["images_per_second"] for row in rows}
    if 1 not in speeds:
        raise UserError(f"--result {folder}: has no DDP on one device")
    name = next(row["case"] for row in rows if row["world"] == 1)
    blocks = log_speeds(run.known)[name].dropna().groupby(level="block").mean()
    row = next(row for row in rows if row["world"] == 1)
    classes = next((r["start"].get("classes") for r in run.known if r.get("start")), None)
    more = {"batch": row["local_batch"], "classes": classes}  # of old records None
    return run.known[0]["plan"] | more, [*map(math.exp, blocks)], speeds


def numbers(text: str, flag: str, kind=float) -> list:
    """A flag's numbers above 0, with commas. Raises UserError."""
    try:
        found = [kind(part) for part in text.split(",")]
        if min(found) > 0:
            return found
    except ValueError:
        pass
    raise UserError(f"{flag} {text}: give numbers above 0, with commas")


def points(text: str) -> dict[int, float]:
    """--measured. Raises UserError."""
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        return {int(ranks): float(speed) for ranks, speed in pairs}
    except ValueError:
        raise UserError(f"--measured {text}: give RANKS:IMAGES/S, with commas: 1:367") from None


def simulate(args, parts, steps: list[float], batch: float) -> list[dict]:
    """The predictions of the first form. steps: one device's seconds, measured once or more."""
    found, overlaps = links(args.comm)
    overlap = median(overlaps)
    per_node = args.per_node or (1 if "inside" not in found else max(args.ranks))
    if max(args.ranks) > per_node and "between" not in found:
        raise UserError("--per-node: give a file of comm on several machines, one rank on each")
    if per_node > 1 and "inside" not in found:
        raise UserError("--per-node: give a file of comm within a machine, too")
    nothing, dice, rows = [(0.0, math.inf)], random.Random(SEED), []
    inside, between = (found.get(where, nothing) for where in ("inside", "between"))
    for ranks in args.ranks:

        def seconds(size, a=inside[0], b=between[0], ranks=ranks):
            return all_reduce(size, ranks, per_node, a, b)

        def sample(seconds=seconds) -> float:
            single = fmean(dice.choices(steps, k=len(steps)))
            link = partial(seconds, a=dice.choice(inside), b=dice.choice(between))
            part = median(dice.choices(overlaps, k=len(overlaps)))
            took = step(single, parts, link, part)
            return took * math.exp(dice.gauss(0, NOISE))

        single = fmean(steps)
        took = step(single, parts, seconds, overlap)
        low, high = comm.ends([ranks * batch / sample() for _ in range(DRAWS)])
        row = {"step_ms": 1e3 * took, "images_per_second": ranks * batch / took, "low": low}
        row |= {"high": high, "efficiency": single / took, "overlap": overlap}
        row["hides_at"] = math.ceil(batch * hides(single, parts, seconds, overlap))
        rows.append({"ranks": ranks, "nodes": math.ceil(ranks / per_node)} | row)
    return rows


def extrapolate(args, known: dict[int, float]) -> list[dict]:
    """The predictions of the third form, from the speeds of one rank and of another number."""
    others = [ranks for ranks in known if ranks > 1]
    if 1 not in known or not others:
        raise UserError("--measured: give one rank's speed and another: 1:367,8:2888")
    rows, per_node = [], args.per_node or max(args.ranks)
    for ranks in args.ranks:
        middle, low, high = fitted(known[1], others[0], known[others[0]], ranks, per_node)
        row = {"images_per_second": middle, "low": low, "high": high}
        row["efficiency"] = middle / known[1] / ranks
        rows.append({"ranks": ranks, "nodes": math.ceil(ranks / per_node)} | row)
    return rows


def show(rows: list[dict]) -> None:
    """Prints the predictions."""
    from bench.show.terminal import show

    measured = "hides_at" in rows[0]
    interval = "95% interval" if measured else "90% interval"
    texts = [["ranks", "nodes", "images/s", interval, "efficiency", "worth, devices"]]
    texts[0] += ["local batch that hides"] * measured
    for x in rows:
        speeds = (f"{x[key]:,.0f}" for key in ("images_per_second", "low", "high"))
        texts.append([f"{x['ranks']}", f"{x['nodes']}", next(speeds), " to ".join(speeds)])
        texts[-1] += [f"{x['efficiency']:.0%}", f"{x['efficiency'] * x['ranks']:.1f}"]
        texts[-1] += [f"{x['hides_at']:,}"] if "hides_at" in x else []
    show("predicted for DDP", texts, None if sys.stdout.isatty() else 100)


def draw(rows: list[dict], one: float, known: dict[int, float], path: Path) -> None:
    """Writes the plot: the prediction and its interval, what was measured, and the ideal."""
    from bench.show import style

    (figure, axes), ranks = comm.empty_plot(), [1, *(x["ranks"] for x in rows)]
    axes.plot(ranks, [one * n for n in ranks], color=style.GREY, ls="--", label="ideal")
    curves = [[one, *(x[key] for x in rows)] for key in ("images_per_second", "low", "high")]
    axes.plot(ranks, curves[0], color=style.BLUE, label="predicted, with its interval")
    axes.fill_between(ranks, curves[1], curves[2], color=style.BLUE, alpha=0.2, lw=0)
    if known:
        axes.plot([*known], [*known.values()], "o", color=style.ORANGE, label="measured")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="images/s")
    axes.set_xticks(ranks, [str(n) for n in ranks], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(True)
    figure.legend(loc=style.BELOW, ncols=3)
    comm.save_plot(figure, path)


def parse(argv: list[str]):
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("comm", nargs="*", type=Path, metavar="COMM", help="files of `bench comm`")
    add("--result", type=Path, metavar="DIR", help="of `bench run`: the step, the model, the batch")
    add("--step-ms", help="one device's step; several measurements with commas")
    add("--batch", type=positive(int), default=1, help="local batch [1]")
    add("--arch", help="classification model of torchvision")
    add("--parameters", type=positive(float), help="how many, instead of --arch")
    add("--image-size", type=positive(int), default=32, help="pixels per side [32]")
    add("--classes", type=positive(int), default=10, help="[10]")
    add("--ranks", default="2,4,8,16,32", help="to predict, with commas [%(default)s]")
    add("--per-node", type=positive(int), help="ranks of a node [all, or 1 with no COMM of a node]")
    add("--measured", default="", help="speeds: RANKS:IMAGES/S, with commas")
    add("--out", type=Path, default=Path("predict.jsonl"), metavar="FILE", help="[%(default)s]")
    args = parser.parse_args(argv)
    args.ranks = sorted({*numbers(args.ranks, "--ranks", int)} - {1})
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}")
    if args.comm and not args.result and not args.step_ms:
        raise UserError("--step-ms: give one device's step, or --result")
    if args.comm and not (args.result or args.arch or args.parameters):
        raise UserError("--arch: give the model, or --parameters")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    known = points(args.measured)
    if not args.comm:
        rows, one = extrapolate(args, known), known[1]
    else:
        batch, size, classes = args.batch, args.image_size, args.classes
        steps = [ms / 1e3 for ms in numbers(args.step_ms, "--step-ms")] if args.step_ms else []
        if args.result:
            plan, speeds, measured = from_result(args.result)
            batch, args.arch, classes = plan["batch"], plan["arch"], plan["classes"] or classes
            size = plan["image_size"] or data.usual_size(plan["dataset"])
            steps, known = [batch / speed for speed in speeds], measured | known
        found = evenly(args.parameters) if args.parameters else None
        found = found or gradients(args.arch, size, classes)
        rows, one = simulate(args, buckets(found), steps, batch), batch / fmean(steps)
    lines = [{"kind": "prediction", **row} for row in rows]
    records.write_whole(args.out, "".join(f"{json.dumps(line)}\n" for line in lines))
    show(rows)
    draw(rows, one, known, args.out.with_suffix(".png"))
    return 0
