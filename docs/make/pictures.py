"""The pictures of docs/learn/, drawn from traces in logs/, from torch itself, and from formulas.

SVG files, light and dark. (`python -m mistakes run ... --svg` makes mistake.svg: CONTRIBUTING.md.)
`python -m docs.make` draws those again whose words or shapes changed.
"""

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from bench import ROOT
from bench.formulas import BYTES, states
from bench.ladder import DDP, LADDER, PLAIN, TECHNIQUES
from bench.show.plot import svg
from bench.show.style import BLUE, GREEN, INK, LINE, MUTED, ORANGE, SKY, STYLE, THEMED, YELLOW
from docs.make.diff import counts, diff
from docs.make.logs import lines_of, logged

FOLDER = ROOT / "docs" / "learn"
PHASES = {"forward": SKY, "backward": BLUE, "step": GREEN}
MESSAGES = {
    "broadcast": YELLOW,
    "all_gather": YELLOW,
    "all_reduce": ORANGE,
}
CSS = ROOT / "bench" / "show" / "report.css"  # has the colours of a dark page


def empty(width: float, height: float):
    """A figure without axes' lines, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure, axes


def trace(run: str) -> Figure:
    """One step of two ranks in time: what each computes, and below it what Gloo sends."""
    (path, *_) = logged("*/effects/step.jsonl")
    ranks = [r for r in lines_of(path) if r["event"] == "trace" and r["run"] == run]
    figure, axes = empty(7.2, 2.3)
    ticks, used = {}, {}
    for number, record in enumerate(ranks):
        top = 2.6 * number
        ticks[top] = f"rank {record['traced_rank']}"
        ticks[top + 0.85] = "sends"
        for kind, begin, end in record["spans"]:
            low = top + 0.85 * (kind in MESSAGES)
            fill = (PHASES | MESSAGES)[kind]
            bars = axes.barh(low, end - begin, left=begin, height=0.72, color=fill, linewidth=0)
            used.setdefault(kind.replace("_", "-"), bars)
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.spines["bottom"].set_visible(True)
    axes.set_xlabel("ms since the step began; resnet18 on two CPU cores, with Gloo")
    names = [name for name in (*PHASES, "broadcast", "all-gather", "all-reduce") if name in used]
    figure.legend([used[n] for n in names], names, loc="outside upper center", ncols=len(names))
    return figure


def sampler() -> Figure:
    """Which rank gets which image in two epochs: DistributedSampler's own indices."""
    from torch.utils.data import DistributedSampler

    images, ranks, batch = 16, 2, 4
    figure, axes = empty(7.2, 1.9)
    for epoch in range(2):
        shares = []
        for rank in range(ranks):
            dealt = DistributedSampler(range(images), ranks, rank, seed=0, drop_last=True)
            dealt.set_epoch(epoch)
            shares.append([*dealt])
        for place in range(images):
            x = place + 0.5 * (place // batch)
            rank = place % ranks
            fill = (SKY, YELLOW)[rank]
            axes.bar(x, 0.8, bottom=-1.2 * epoch, width=0.9, color=fill, linewidth=0)
            text = str(shares[rank][place // ranks])
            axes.text(x, 0.4 - 1.2 * epoch, text, ha="center", va="center", color="#000000")
        axes.text(-1, 0.4 - 1.2 * epoch, f"epoch {epoch + 1}", ha="right", va="center", color=INK)
    for step in range(images // batch):
        axes.text(4.5 * step + 1.5, 1, f"step {step + 1}", ha="center", color=MUTED)
    keys = [axes.bar(0, 0, color=fill) for fill in (SKY, YELLOW)]
    figure.legend(keys, ["rank 0", "rank 1"], loc="outside lower center", ncols=2)
    axes.set_xticks([])
    return figure


def hang() -> Figure:
    """A collective under `if rank == 0`: each rank waits in another one."""
    figure, axes = empty(7.2, 1.7)
    rows = {
        "rank 0": [("step k", 2, BLUE), ("all-reduce of the metrics: waits for rank 1", 6, ORANGE)],
        "rank 1": [
            ("step k", 2.2, BLUE),
            ("forward of step k + 1: its broadcast waits for rank 0", 5.8, ORANGE),
        ],
    }
    for place, (name, parts) in enumerate(rows.items()):
        left = 0.0
        for text, long, fill in parts:
            axes.barh(place, long, left=left, height=0.7, color=fill, linewidth=0)
            axes.text(left + 0.1, place, text, va="center", color="white", fontsize=8.5)
            left += long
        axes.text(-0.1, place, name, ha="right", va="center", color=INK)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlabel("time; until the timeout, 30 minutes with Gloo, 10 with NCCL")
    return figure


def rings() -> Figure:
    """What the busiest rank sends in one all-reduce, by formula: a star, and a ring."""
    figure, axes = empty(5.2, 2.6)
    sizes = [2, 4, 8, 16, 32]
    star = [size - 1 for size in sizes]
    ring = [2 * (size - 1) / size for size in sizes]
    axes.plot(
        sizes, star, color=ORANGE, marker="s", label="star: rank 0 sends N to each other rank"
    )
    axes.plot(sizes, ring, color=BLUE, marker="o", label="ring: 2 (W - 1) / W times N")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_yticks([0, 2, 10, 20, 30])
    axes.grid(axis="y")
    axes.set_xlabel("ranks W")
    axes.set_ylabel("sent by the busiest rank, in units of N")
    axes.legend()
    return figure


def zero() -> Figure:
    """Bytes a rank holds, by formula, on 8 ranks, in units of N parameters; SGD with momentum."""
    world = 8
    figure, axes = empty(6.2, 2.5)
    kinds = ("weights", "gradients", "momentum")
    rows = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3, FSDP": 3}
    drawn = []
    for place, sharded in enumerate(rows.values()):
        left = 0.0
        each = states(1, BYTES["sgd", "fp32"], sharded, world)
        for size, fill in zip(each, (BLUE, SKY, YELLOW), strict=True):
            bar = axes.barh(place, size, left=left, height=0.7, color=fill, linewidth=0)
            drawn += [bar] if place == 0 else []
            left += size
        axes.text(left + 0.1, place, f"{left:g} N", va="center", color=INK)
    axes.set_yticks(range(len(rows)), [*rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 13.5)
    axes.spines["bottom"].set_visible(True)
    axes.set_xlabel("bytes on each of 8 ranks, for N parameters in fp32, without activations")
    figure.legend(drawn, kinds, loc="outside upper center", ncols=3)
    return figure


def tree() -> Figure:
    """The scripts, each at its parent, with the lines that its diff adds."""
    children: dict[str, list] = {}
    for script in [*LADDER, *TECHNIQUES]:
        if script.parent:
            children.setdefault(script.parent, []).append(script)
    rows: list[tuple[int, str, str]] = []

    def put(path: str, depth: int) -> None:
        mine = children.get(path, [])
        for script in sorted(mine, key=lambda s: (s.path != DDP, s.path.startswith("tech"))):
            rows.append((depth, script.path, f"+{counts(diff(script.parent, script.path))[0]}"))
            put(script.path, depth + 1)

    rows.append((0, PLAIN, ""))
    put(PLAIN, 1)
    figure, axes = empty(5.4, 0.2 * len(rows))
    last: dict[int, int] = {}
    for place, (depth, path, lines) in enumerate(rows):
        x = 0.6 * depth
        fill = ORANGE if path.startswith("tech") else BLUE
        axes.plot([x], [place], "o", color=fill, markersize=5)
        axes.text(x + 0.18, place, f"{path}  {lines}", va="center", color=INK, fontsize=8.5)
        if depth:
            begin = last[depth - 1]
            axes.plot([x - 0.6, x - 0.6, x], [begin, place, place], color=LINE, zorder=0)
        last[depth] = place
    axes.set_xlim(-0.2, 6)
    axes.invert_yaxis()
    axes.set_xticks([])
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "step": lambda: trace("DDP"),
    "fsdp": lambda: trace("FSDP"),
    "sampler": sampler,
    "hang": hang,
    "rings": rings,
    "zero": zero,
    "tree": tree,
}


def drawn(name: str) -> str:
    """A picture as SVG, with its colours for a light and for a dark page."""
    with matplotlib.rc_context(STYLE):
        text = svg(PICTURES[name]())
    light = " ".join(f"--plot-{key}: {value};" for key, value in THEMED.items())
    dark = " ".join(re.findall(r"--plot-\w+: #\w+;", CSS.read_text().split("scheme: dark")[1]))
    style = f"<style>\nsvg {{ {light} }}\n"
    style += f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n</style>"
    return text.replace(">", f">\n{style}", 1) + "\n"


def words(text: str) -> list[str]:
    """What an SVG says and how many shapes it has, which does not depend on fonts."""
    return [*re.findall(r">([^<>]+)</text>", text), str(text.count("<path"))]


def stale(folder: Path = FOLDER) -> dict[Path, str]:
    """The files that say something else than what would be drawn, each with its new text."""
    found = {}
    for name in PICTURES:
        path, new = folder / f"{name}.svg", drawn(name)
        if not path.exists() or words(path.read_text()) != words(new):
            found[path] = new
    return found
