"""Draws the pictures of a run, from its records alone: PNG files, and SVG for the page.

A function ..._picture takes a Run and returns a Picture, which answers a question; or None where
the run has nothing to show for it. In the SVG every colour is a variable of report.css, so that the
page has them light and dark.
"""

import io
import re
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from bench import records, stats
from bench.cases import AGAIN, PLAIN
from bench.show import style
from bench.show.claims import CPU, control
from bench.show.style import INK, MUTED, THEMED, Picture, colour, reach, row_by_row
from bench.show.summary import Run, log_speeds, timed, title

matplotlib.rcParams |= style.STYLE
ABOVE, BELOW = 0.32, 0.48  # inches of a PNG, for its question and for where it was measured
CAPTION = 112  # characters in a line of the latter


def throughput_picture(run: Run) -> Picture | None:
    """Images/s of each case with its interval and its blocks; the ratio stands on the bar."""
    rows, speeds = timed(run.rows), log_speeds(run.known)
    figure, (axes,) = row_by_row(rows)
    axes.barh(
        range(len(rows)),
        [row["images_per_second"] for row in rows],
        height=0.66,
        color=[colour(row) for row in rows],
    )
    ends = []
    for place, row in enumerate(rows):
        value = row["images_per_second"]
        blocks = np.exp(stats.block_means(speeds[row["case"]]).to_numpy())
        # A tick a block, all in one path, so that thousands of them stay small.
        x = np.stack([blocks, blocks, np.full_like(blocks, np.nan)], axis=1).ravel()
        y = place + np.tile([-0.22, 0.22, np.nan], len(blocks))
        axes.plot(x, y, color=INK, linewidth=0.6, alpha=0.55)
        errors = reach(row, "images_per_second")
        axes.errorbar(value, place, xerr=errors, color=INK, capsize=4, linewidth=1.4)
        ends.append(max([*blocks, value, row.get("images_per_second_high") or 0]))
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        text = "1" if row["case"] == PLAIN else row.get("ratio") and f"{row['ratio']:.2f}"
        space = 0.015 * max(ends)
        axes.text(end + space, place, text or "", va="center", color=INK, fontweight="bold")
    axes.set_xlim(0, 1.1 * max(ends))
    axes.set_xlabel(
        "images/s: mean, 95% interval, a tick a block; the number: speed-up over snsc.py"
    )
    return Picture(figure, "How fast does each script train?")


def claim(row: dict, key: str) -> str | None:
    """What a row claims by a ratio, of style.CLAIMS; None where it is a speed-up and no claim."""
    if row["case"] == AGAIN:
        return style.CONTROL if key == "ratio" else None
    return row.get(key.replace("ratio", "claim"))


def ratios_picture(run: Run) -> Picture | None:
    """Forest plots: against the plain script, and against DDP with as many processes."""
    rows = [row for row in timed(run.rows) if claim(row, "ratio") or claim(row, "ddp_ratio")]
    rows = [row for row in rows if row.get("ratio") or row.get("ddp_ratio")]
    if not rows:
        return None
    others = {"ratio": PLAIN, "ddp_ratio": "DDP xN"}
    keys = [key for key in others if any(claim(row, key) for row in rows)]
    figure, panels = row_by_row(rows, len(keys))
    made = set()
    for axes, key in zip(panels, keys, strict=True):
        for place, row in enumerate(rows):
            if word := claim(row, key):
                made.add(word)
                edge, mark, fill = style.CLAIMS[word]
                look = {"marker": mark, "markerfacecolor": fill, "capsize": 3, "markersize": 7}
                axes.errorbar(row[key], place, xerr=reach(row, key), color=edge, **look)
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.set_xlabel(f"images/s against {others[key]}")
    again = control(run.rows)
    if again and reach(again, "ratio"):
        panels[0].axvspan(again["ratio_low"], again["ratio_high"], color=style.PALE, zorder=0)
    names, handles = [name for name in style.CLAIMS if name in made], []
    for edge, mark, fill in map(style.CLAIMS.get, names):
        handles += panels[0].plot([], [], color=edge, marker=mark, markerfacecolor=fill)
    figure.legend(handles, names, loc=style.BELOW, ncols=len(names))
    return Picture(figure, "Which differences are more than noise?")


def scaling_picture(run: Run) -> Picture | None:
    """Speed-up by world size, from two sizes on, each process with a device of its own; beside it
    the efficiency against one rank.
    """
    rows = [row for row in timed(run.rows) if row["ratio"] and not row["technique"]]
    rows = [row for row in rows if row["case"] not in (PLAIN, AGAIN)]
    sizes = sorted({row["world"] for row in rows})
    if len(sizes) < 2:
        return None
    speed_up = {row["case"]: row["ratio"] for row in rows}
    share = {r["case"]: 100 * (1 - r["overhead_share"]) for r in rows if r["overhead_share"]}
    figure = Figure(figsize=style.FREE, layout="constrained")
    panels = figure.subplots(1, 1 + bool(share), squeeze=False)[0]
    drawn = {}
    for k, script in enumerate(dict.fromkeys(row["script"] for row in rows)):
        mine = sorted((r for r in rows if r["script"] == script), key=lambda r: r["world"])
        look = {"color": colour(mine[-1]), "marker": style.MARKS.get(script, "o")}
        shift = 1 + 0.015 * (k - 2)  # else the marks would lie on each other
        for axes, values in zip(panels, (speed_up, share), strict=False):
            part = [row for row in mine if row["case"] in values]
            places = [row["world"] * shift for row in part]
            (line,) = axes.plot(places, [values[row["case"]] for row in part], **look)
            drawn.setdefault(script, line)
    (drawn["ideal"],) = panels[0].plot(sizes, sizes, "--", color=MUTED, linewidth=1)
    panels[0].set_ylabel(f"speed-up over {PLAIN}")
    if share:
        panels[1].axhline(100, linestyle="--", color=MUTED, linewidth=1)
        panels[1].set_ylabel("% of the speed of one rank alone")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_xlabel("world size")
        axes.grid(axis="y")
    figure.legend([*drawn.values()], [*drawn], loc=style.BELOW, ncols=3)
    return Picture(figure, "What do more processes bring?")


def shares_picture(run: Run) -> Picture | None:
    """Where a step goes, of the cases of which one rank was measured alone, too."""
    rows = [row for row in timed(run.rows) if row["overhead_share"] is not None]
    if not rows:
        return None
    figure, (axes,) = row_by_row(rows)
    data = np.array([row["data_share"] for row in rows])
    lost = np.array([max(0, row["overhead_share"]) for row in rows])
    parts = [("waiting for data", data, style.YELLOW)]
    parts += [("computing, and communication that it hides", 1 - data - lost, style.SKY)]
    parts += [("lost to communication, waiting, contention", lost, style.ORANGE)]
    left, bars = 0 * data, []
    for _, share, fill in parts:
        share = share.clip(min=0)
        bars.append(axes.barh(range(len(rows)), 100 * share, left=100 * left, color=fill))
        left = left + share
    names, idle = [name for name, *_ in parts], [row["idle"] for row in rows]
    if any(x is not None for x in idle):
        ends = [float("nan") if x is None else 100 * (1 - x) for x in idle]
        look = {"color": INK, "marker": "|", "markersize": 15, "markeredgewidth": 2.5}
        bars += axes.plot(ends, range(len(rows)), linestyle="none", **look)
        names.append("right of this mark: share of time that cores idle")
    axes.set_xlabel("% of a step's time")
    axes.set_xlim(0, 100)
    figure.legend(bars, names, loc=style.BELOW, ncols=2)
    return Picture(figure, "Where does the time go?")


PICTURES = {
    "throughput": throughput_picture,
    "ratios": ratios_picture,
    "scaling": scaling_picture,
    "shares": shares_picture,
}


def pictures(run: Run) -> dict[str, Picture]:
    """Those that have something to show, by name."""
    found = {name: make(run) for name, make in PICTURES.items()}
    return {name: picture for name, picture in found.items() if picture}


def svg(figure: Figure) -> str:
    """A figure as an element of a page, its colours as variables."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    for name, code in THEMED.items():
        text = text.replace(code, f"var(--plot-{name})")
    return re.sub(r"\n\s*", "\n", text).strip()


def png(picture: Picture, run: Run, path: Path) -> None:
    """The figure as a file of its own, with its question and where it was measured."""
    figure = picture.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # done: what is added below gets space of its own
    for legend in figure.legends:  # else it would move there
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)
    width, height = figure.get_size_inches()
    whole = Bbox([[0, -BELOW], [width, height + ABOVE]])
    up, down = 1 + 0.06 / height, -0.04 / height
    figure.text(0.01, up, picture.question, fontsize=12, va="bottom")
    text = title(run.known) + ("." if run.gpus else f". {CPU}")
    text = textwrap.fill(text, CAPTION)
    figure.text(0.01, down, text, fontsize=7, color=THEMED["muted"], va="top")
    options = {"format": "png", "pil_kwargs": {"compress_level": 4}}
    figure.savefig(file := io.BytesIO(), dpi=120, bbox_inches=whole, **options)
    records.write_whole(path, file.getvalue())


def write(run: Run) -> None:
    """Makes the plots; those of an earlier call go."""
    drawn = pictures(run)
    for old in run.folder.glob("*.png"):
        if old.stem not in drawn:
            old.unlink()
    for name, picture in drawn.items():
        png(picture, run, run.folder / f"{name}.png")
