"""The eight plots of a run, from its records alone.

Readable in grey and by the colour-blind: marks, lines and hatches tell the series apart, not only
colour (the palette is Okabe and Ito's, 2008).
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from bench.cases import AGAIN, PLAIN
from bench.results import records
from bench.results.records import counted, speeds_by_round, step_seconds
from bench.results.stats import throughput
from bench.results.summary import by_case, title, usable

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
MARKS = ["o", "s", "^", "D", "v", "P", "X"]
LINES = ["-", "--", "-.", ":"]


def styles(names) -> dict[str, dict]:
    """A colour, mark and line for each name."""
    return {
        name: {
            "color": COLOURS[k % 7],
            "marker": MARKS[(k + k // 7) % 7],  # else the eighth would look like the first
            "linestyle": LINES[k % 4],
        }
        for k, name in enumerate(dict.fromkeys(names))
    }


def with_a(key: str, rows: list[dict]) -> list[dict]:
    """The rows that have this number."""
    return [row for row in rows if row[key] is not None]


def name_rows(rows: list[dict], axes) -> None:
    """Names the rows of a plot with one row a case, the first on top."""
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def row_by_row(rows: list[dict]):
    """A figure with a row for each case."""
    return plt.subplots(figsize=(8, 1.6 + 0.36 * len(rows)), layout="constrained")


def reach(row: dict, key: str) -> list[list[float]]:
    """How far the interval of a number goes to the left and to the right, as errorbar takes it."""
    return [[row[key] - row[f"{key}_low"]], [row[f"{key}_high"] - row[key]]]


def throughput_plot(known: list[dict], rows: list[dict]):
    """Images/s of each case: the median, its 95% interval, and every round as a point."""
    speeds = speeds_by_round(known)
    figure, axes = row_by_row(rows)
    scale = max((row["images_per_second"] or 0 for row in rows), default=0) or 1
    for place, row in enumerate(rows):
        value = row["images_per_second"]
        if value is None:
            text = row["status"][:95]
            axes.text(0.01 * scale, place, text, va="center", fontsize=7, color="#555555")
            continue
        errors = reach(row, "images_per_second")
        look = {"color": "#DDDDDD", "hatch": "//"} if row["script"] == PLAIN else {}
        look = {"color": "#9CC9E4", "edgecolor": "#333333", "linewidth": 0.6} | look
        axes.barh(place, value, height=0.62, **look)
        rounds = [*speeds[row["case"]].values()]
        axes.plot(rounds, [place + 0.2] * len(rounds), ".", color="#D55E00", alpha=0.5, zorder=3)
        axes.errorbar(value, place, xerr=errors, color="black", capsize=3, linewidth=1.2)
    name_rows(rows, axes)
    axes.set_xlim(left=0)
    axes.set_xlabel("images/s: median and 95% interval; each round is a point")
    axes.set_title("Throughput at the same global batch")
    return figure


def ratios_plot(known: list[dict], rows: list[dict]):
    """A forest plot: the ratio to the plain script, and the band that the control spans."""
    rows = [row for row in with_a("ratio", rows) if row["case"] != PLAIN]
    figure, axes = row_by_row(rows)
    axes.axvline(1, color="#888888", linewidth=0.8)
    for place, row in enumerate(rows):
        look = {"color": COLOURS[0], "marker": "o", "capsize": 3}
        if row["case"] == AGAIN:
            ends, words = (row["ratio_low"], row["ratio_high"]), "the control's interval: noise"
            axes.axvspan(*ends, color="#DDDDDD", zorder=0, label=words)
            axes.legend(frameon=False, fontsize=8, loc="best")
            look["color"] = "#888888"
        axes.errorbar(row["ratio"], place, xerr=reach(row, "ratio"), **look)
    name_rows(rows, axes)
    axes.set_xlabel(f"images/s over those of {PLAIN} in the same round: median, 95% interval")
    axes.set_title("Which differences are more than noise")
    return figure


def scaling_plot(known: list[dict], rows: list[dict]):
    """Strong scaling (the global batch stays) and weak scaling (the local batch does)."""
    figure, both = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    rows = [r for r in with_a("ratio", rows) if r["share"] == 1 and not r["technique"]]
    sizes = sorted({1, *(row["world"] for row in rows)})
    gpus = known[0]["environment"]["gpus"]
    weak = [
        {**row, "weak": 1 - row["exposed_share"]}
        | {"weak_low": 1 - row["exposed_share_high"], "weak_high": 1 - row["exposed_share_low"]}
        for row in with_a("exposed_share", rows)
    ]
    scripts = [row["script"] for row in rows if row["script"] != PLAIN]
    looks = styles(scripts)
    for k, (script, look) in enumerate(looks.items()):
        shift = 1 + 0.02 * (k - (len(looks) - 1) / 2)  # else the marks would lie on each other
        for axes, source, key in ((both[0], rows, "ratio"), (both[1], weak, "weak")):
            mine = [row for row in source if row["script"] == script]
            if not mine:
                continue
            mine.sort(key=lambda row: row["world"])
            places = [row["world"] * shift for row in mine]
            errors = np.hstack([reach(row, key) for row in mine])
            style = look | {"capsize": 3, "linewidth": 1.2, "label": script}
            axes.errorbar(places, [row[key] for row in mine], yerr=errors, **style)
    # A CPU's cores are all at work in the plain script: no more speed is to be had from them.
    ideal, word = (sizes, "ideal") if gpus else ([1] * len(sizes), "ideal: the same cores")
    both[0].plot(sizes, ideal, "--", color="#888888", linewidth=1, label=word)
    both[1].axhline(1, color="#888888", linewidth=1, linestyle="--", label="ideal")
    for axes in both:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_xlabel("world size")
    both[0].legend(frameon=False, fontsize=8)
    both[0].set_ylabel(f"speed-up over {PLAIN}, 95% interval")
    both[0].set_title("Strong scaling: the global batch stays the same")
    both[1].set_ylabel("efficiency against one rank alone, 95% interval")
    both[1].set_title("Weak scaling: the local batch stays the same")
    if not weak:
        middle = {"ha": "center", "transform": both[1].transAxes, "color": "#555555"}
        both[1].text(0.5, 0.5, "one rank alone was not measured in this run", **middle)
    return figure


def steps_plot(known: list[dict], rows: list[dict]):
    """How long a step takes: the spread over all windows of a case."""
    rows = with_a("step_p50_ms", rows)
    steps: dict[str, list[float]] = {row["case"]: [] for row in rows}
    for sample in records.of(known, "sample"):
        if sample["case"] in steps:
            steps[sample["case"]] += [1000 * x for x in step_seconds(sample)]
    figure, axes = row_by_row(rows)
    if rows:
        spread = {"whis": (5, 95), "vert": False, "widths": 0.6, "positions": range(len(rows))}
        points = {"marker": ".", "markersize": 2, "alpha": 0.4}
        axes.boxplot([*steps.values()], **spread, flierprops=points)
    name_rows(rows, axes)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a step, means of short windows: median, quartiles, 5th and 95th percentile")
    axes.set_title("How long a step takes")
    return figure


def shares_plot(known: list[dict], rows: list[dict]):
    """Where a step goes: waiting for data, exposed communication, computing."""
    rows = with_a("step_p50_ms", rows)
    figure, axes = row_by_row(rows)
    data = np.array([row["data_share"] for row in rows])
    exposed = np.array([max(0, row["exposed_share"] or 0) for row in rows])
    parts = [("waiting for data", data, "#E69F00", "//")]
    rest = (1 - data - exposed).clip(min=0)
    parts += [("computing, and communication that it hides", rest, "#9CC9E4", "")]
    parts += [("exposed communication", exposed, "#D55E00", "xx")]
    left = 0 * data
    for name, share, colour, hatch in parts:
        look = {"color": colour, "hatch": hatch, "edgecolor": "#333333", "linewidth": 0.6}
        axes.barh(range(len(rows)), 100 * share, left=100 * left, height=0.62, label=name, **look)
        left = left + share
    name_rows(rows, axes)
    axes.set_xlabel("% of a step's time")
    axes.set_xlim(0, 100)
    axes.set_title("Where the time goes")
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=3)
    return figure


def drift_plot(known: list[dict], rows: list[dict]):
    """Every sample in the order of time: what the machine did meanwhile."""
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    samples = [s for s in records.of(known, "sample") if s.get("begin")]
    names = [row["case"] for row in rows if any(s["case"] == row["case"] for s in samples)]
    begin = min((s["begin"] for s in samples), default=0)
    for name, look in styles(names).items():
        mine = [s for s in samples if s["case"] == name]
        minutes = [(s["begin"] - begin) / 60 for s in mine]
        rates = [throughput(counted(s)) for s in mine]
        look = look | {"linestyle": "", "markersize": 4 if len(mine) < 100 else 2}
        axes.plot(minutes, rates, **look, alpha=0.7, label=name)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set_xlabel("minutes since the first sample")
    axes.set_ylabel("images/s")
    axes.set_title("Drift: every sample in the order of time")
    if names:
        axes.legend(frameon=False, fontsize=7, loc="lower right", ncols=2)
    return figure


def memory_plot(known: list[dict], rows: list[dict]):
    """Throughput against the memory of the largest process."""
    rows = with_a("memory_mib", with_a("images_per_second", rows))
    rows = [row for row in rows if row["case"] != AGAIN]
    looks = styles(row["case"] for row in rows)
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for row in rows:
        look = looks[row["case"]] | {"linestyle": "", "markersize": 8, "label": row["case"]}
        axes.plot(row["memory_mib"], row["images_per_second"], **look)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
    axes.set_xlabel("peak memory of the largest process, MiB")
    axes.set_ylabel("images/s")
    axes.set_title("Throughput against memory")
    if rows:
        axes.legend(frameon=False, fontsize=7, loc="lower left")
    return figure


def loss_plot(known: list[dict], rows: list[dict]):
    """The losses of one launch of each case: they lie on each other where the numbers are equal."""
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    curves: dict[str, dict[int, float]] = {}
    samples = records.of(known, "sample")
    first = min((s.get("launch", s["round"]) for s in samples), default=1)
    for sample in samples:
        if sample.get("launch", sample["round"]) == first:
            curve = curves.setdefault(sample["case"], {})
            curve |= {w["step"]: w["loss"] for w in sample["windows"] if "loss" in w}
    names = [row["case"] for row in rows if row["share"] == 1 and curves.get(row["case"])]
    for k, (name, look) in enumerate(styles(names).items()):
        points = sorted(curves[name].items())
        width = 1 + 5 * (1 - k / len(names))  # the later ones narrower, so that none is hidden
        every = {"markevery": max(1, len(points) // 12), "markersize": 4}
        axes.plot(*zip(*points, strict=True), **look, **every, linewidth=width, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, a window's mean")
    axes.set_title("Losses of one launch each: equal at the same local batch and kernels")
    if names:
        axes.legend(frameon=False, fontsize=7)
    return figure


PLOTS = {
    "throughput": throughput_plot,
    "ratios": ratios_plot,
    "scaling": scaling_plot,
    "steps": steps_plot,
    "shares": shares_plot,
    "drift": drift_plot,
    "memory": memory_plot,
    "loss": loss_plot,
}


_inherited: list = []  # the records and their rows, in the processes that draw


def draw(name: str, folder: Path) -> Path:
    """One plot, written whole or not at all; its path."""
    known, rows = _inherited
    figure = PLOTS[name](known, rows)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    text = title(known)
    if not known[0]["environment"]["gpus"]:
        text += "\nA plot from a CPU does not predict the order on GPUs."
    figure.supxlabel(text, fontsize=7, color="#444444", wrap=True)
    path = folder / f"{name}.png"
    part = path.with_name(path.stem + ".part.png")
    figure.savefig(part, dpi=120, pil_kwargs={"compress_level": 4})
    plt.close(figure)
    part.replace(path)
    return path


def write(folder: Path) -> list[Path]:
    """Makes the plots of a folder's records, and returns their paths.

    Raises records.BadRecords.
    """
    known = usable(records.measured(folder)[0])
    # Forked, since what is inherited need not be copied: two at once take half the time.
    setting = {"mp_context": get_context("fork"), "initializer": _inherited.extend}
    with ProcessPoolExecutor(2, **setting, initargs=([known, by_case(known)],)) as pool:
        jobs = [pool.submit(draw, name, folder) for name in PLOTS]
        return [job.result() for job in jobs]
