"""The plots of where time and memory go, and of how steady the machine was; as in figures.py."""

import numpy as np
from matplotlib.figure import Figure

from bench import records
from bench.cases import AGAIN, PLAIN
from bench.records import counted, step_seconds
from bench.show.looks import (
    FREE,
    INK,
    LINE,
    ORANGE,
    SKY,
    YELLOW,
    Picture,
    Run,
    colour,
    legend_below,
    row_by_row,
)
from bench.stats import throughput


def steps_picture(run: Run) -> Picture | None:
    """How long a step takes: the spread over all windows of a case."""
    rows = run.with_a("step_p50_ms")
    steps: dict[str, list[float]] = {row["case"]: [] for row in rows}
    for sample in records.of(run.known, "sample"):
        if sample["case"] in steps:
            steps[sample["case"]] += [1000 * x for x in step_seconds(sample)]
    figure, (axes,) = row_by_row(rows)
    boxes = axes.boxplot(
        [*steps.values()],
        positions=range(len(rows)),
        whis=(5, 95),
        widths=0.6,
        orientation="horizontal",
        manage_ticks=False,
        showfliers=False,
        patch_artist=True,
    )
    for box, row in zip(boxes["boxes"], rows, strict=True):
        box.set(facecolor=colour(row), edgecolor=INK)
    for name in ("whiskers", "caps", "medians"):
        for line in boxes[name]:
            line.set(color=INK, linewidth=2 if name == "medians" else 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a step: median, quartiles, 5th and 95th percentile of all windows")
    wide = max(rows, key=lambda row: row["step_p95_ms"] / row["step_p50_ms"])
    answer = f"The 95th percentile is at most {wide['step_p95_ms'] / wide['step_p50_ms']:.1f} "
    answer += f"times the median ({wide['case']})."
    return Picture(figure, "How long does a step take, and how evenly?", answer)


def shares_picture(run: Run) -> Picture | None:
    """Where a step goes, of the cases of which one rank was measured alone, too."""
    rows = run.with_a("exposed_share")
    if not rows:
        return None
    figure, (axes,) = row_by_row(rows)
    data = np.array([row["data_share"] for row in rows])
    exposed = np.array([max(0, row["exposed_share"]) for row in rows])
    parts = [("waiting for data", data, YELLOW)]
    parts += [("computing, and communication that it hides", 1 - data - exposed, SKY)]
    parts += [("exposed communication", exposed, ORANGE)]
    left, bars = 0 * data, []
    for _, share, fill in parts:
        share = share.clip(min=0)
        bars.append(axes.barh(range(len(rows)), 100 * share, left=100 * left, color=fill))
        left = left + share
    axes.set_xlabel("% of a step's time")
    axes.set_xlim(0, 100)
    legend_below(figure, bars, [name for name, *_ in parts], 2)
    most = max(rows, key=lambda row: row["exposed_share"])
    answer = f"At most {most['exposed_share']:.0%} of a step is exposed communication "
    answer += f"({most['case']}): by so much it is longer than the step of one rank alone"
    on_cpu = not run.known[0]["environment"]["gpus"]
    answer += "; on a CPU it includes memory contention." if on_cpu else "."
    return Picture(figure, "Where does the time go?", answer)


def memory_picture(run: Run) -> Picture | None:
    """Peak memory of each case, all its processes together."""
    rows = run.with_a("memory_mib")
    if not rows:
        return None
    figure, (axes,) = row_by_row(rows)
    values = [row["memory_mib"] for row in rows]
    axes.barh(range(len(rows)), values, height=0.66, color=[colour(row) for row in rows])
    for place, value in enumerate(values):
        axes.text(value + 0.015 * max(values), place, f"{value:,.0f}", va="center", color=INK)
    axes.set_xlim(0, 1.12 * max(values))
    axes.set_xlabel("MiB at the peak, all processes of a case together")
    most = max(rows, key=lambda row: row["memory_mib"])
    answer = f"Most by {most['case']}: {most['memory_mib']:,.0f} MiB."
    return Picture(figure, "How much memory does it take?", answer)


def drift_picture(run: Run) -> Picture | None:
    """snsc.py and its control in the order of time, and when the cases were started."""
    samples = [s for s in records.of(run.known, "sample") if s.get("begin")]
    mine = [s for s in samples if s["case"] in (PLAIN, AGAIN)]
    if not mine:
        return None
    begin = min(s["begin"] for s in samples)
    starts: dict[int, float] = {}
    for s in samples:
        starts[s["block"]] = min(starts.get(s["block"], s["begin"]), s["begin"])
    figure = Figure(figsize=FREE, layout="constrained")
    axes = figure.subplots()
    minutes = [(time - begin) / 60 for time in starts.values()]
    style = {"color": LINE, "linewidth": 2, "zorder": 0, "label": "all cases start anew"}
    axes.vlines(minutes, 0, 1, transform=axes.get_xaxis_transform(), **style)
    rates = {}
    for name, edge, mark in ((PLAIN, INK, "o"), (AGAIN, ORANGE, "^")):
        part = [s for s in mine if s["case"] == name]
        rates[name] = [throughput(counted(s)) for s in part]
        style = {"color": edge, "marker": mark, "linestyle": "", "markersize": 4}
        axes.plot([(s["begin"] - begin) / 60 for s in part], rates[name], **style, label=name)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set_xlabel("minutes since the first sample")
    axes.set_ylabel("images/s")
    axes.grid(axis="y")
    legend_below(figure, *axes.get_legend_handles_labels(), 3)
    low, high = np.percentile(rates[PLAIN] or rates[AGAIN], [5, 95])
    answer = f"Nine of ten samples of {PLAIN} lie between {low:,.0f} and {high:,.0f} images/s."
    return Picture(figure, "Was the machine steady?", answer)
