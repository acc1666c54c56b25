"""The plots of a run: each asks a question and answers it from the records, or is left out.

A function takes a Run and returns a Picture, or None where the run has nothing to show for it.
plot.py draws them.
"""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench import records, stats
from bench.cases import AGAIN, PLAIN
from bench.diffs import counts, diff
from bench.show import words
from bench.show.looks import (
    CLAIMS,
    CONTROL,
    FREE,
    INK,
    MUTED,
    PALE,
    Picture,
    Run,
    colour,
    legend_below,
    look,
    reach,
    row_by_row,
)
from bench.show.summary import shared


def throughput_picture(run: Run) -> Picture | None:
    """Images/s of each case with its interval and its blocks; the ratio stands on the bar."""
    rows, speeds = run.with_a("images_per_second"), records.speeds_by_block(run.known)
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
        blocks = np.exp(stats.means(stats.logarithms(speeds[row["case"]])))
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
    ends = sorted(rows, key=lambda row: row["images_per_second"])
    reach_ = " to ".join(
        f"{r['images_per_second']:,.0f} ({r['case']})" for r in (ends[0], ends[-1])
    )
    answer = f"From {reach_} images/s. The next plot shows which differences are more than noise."
    return Picture(figure, "How fast does each script train?", answer)


def claim(row: dict, key: str) -> str | None:
    """What a row claims by a ratio: a key of CLAIMS; None where it is a speed-up and no claim."""
    if row["case"] == AGAIN:
        return CONTROL if key == "ratio" else None
    return row.get(key.replace("ratio", "claim"))


def ratios_picture(run: Run) -> Picture | None:
    """Forest plots: against the plain script, and against DDP with as many processes."""
    rows = [row for row in words.timed(run.rows) if claim(row, "ratio") or claim(row, "ddp_ratio")]
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
                edge, mark, fill = CLAIMS[word]
                style = {"marker": mark, "markerfacecolor": fill, "capsize": 3, "markersize": 7}
                axes.errorbar(row[key], place, xerr=reach(row, key), color=edge, **style)
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.set_xlabel(f"images/s against {others[key]}")
    control = words.control(run.rows)
    if control and reach(control, "ratio"):
        panels[0].axvspan(control["ratio_low"], control["ratio_high"], color=PALE, zorder=0)
    names, handles = [name for name in CLAIMS if name in made], []
    for edge, mark, fill in map(CLAIMS.get, names):
        handles += panels[0].plot([], [], color=edge, marker=mark, markerfacecolor=fill)
    legend_below(figure, handles, names, len(names))
    parts = [words.tally(run.rows, "claim", PLAIN)]
    parts.append(words.tally(run.rows, "ddp_claim", f"{words.DDP} with as many processes"))
    answer = " ".join(filter(None, [*parts, words.steady(run.rows)]))
    return Picture(figure, "Which differences are more than noise?", answer)


def loss_picture(run: Run) -> Picture | None:
    """The losses of the gates by step, and how far each is from its oracle's."""
    gates = {r["case"]: r for r in records.of(run.known, "gate") if r.get("losses")}
    rows = [row for row in run.rows if row["case"] in gates and row["share"] == 1]
    if not rows:
        return None
    apart = {row["case"]: off(gates[row["case"]]) for row in rows}
    two = any(apart.values())
    figure = Figure(figsize=(FREE[0], 5.4 if two else FREE[1]), layout="constrained")
    panels = figure.subplots(1 + two, 1, sharex=True, squeeze=False)[:, 0]
    for k, row in enumerate(rows):
        losses = gates[row["case"]]["losses"]
        width = 1 + 7 * (1 - k / len(rows))  # the later ones narrower, so that none is hidden
        style = look(row) | {"label": row["case"], "markersize": 5}
        panels[0].plot(range(1, len(losses) + 1), losses, linewidth=width, **style)
        if apart[row["case"]]:
            panels[1].plot(range(1, len(losses) + 1), apart[row["case"]], linewidth=1.2, **style)
    panels[0].set_ylabel("training loss")
    if two:
        panels[1].set_yscale("symlog", linthresh=1e-8)
        panels[1].set_ylim(bottom=0)
        panels[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0e}" if value else "0")
        panels[1].set_ylabel("distance from the oracle's,\nrelative")
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    for axes in panels:
        axes.grid(axis="y")
    legend_below(figure, *panels[0].get_legend_handles_labels(), 3)
    return Picture(figure, "Do all scripts train the same numbers?", equal(rows, gates))


def equal(rows: list[dict], gates: dict[str, dict]) -> str:
    """How far the losses, and the updates of the weights, are from the oracle's at most."""
    parts = []
    losses = {row["case"]: row["distance"] for row in rows if row.get("distance") is not None}
    moved = {row["case"]: max(gates[row["case"]].get("update") or [-1]) for row in rows}
    moved = {name: value for name, value in moved.items() if value >= 0}
    for what, far in (("loss", losses), ("update of the weights", moved)):
        if far:
            name = max(far, key=far.get)
            most = f"{far[name]:.0e} ({name})" if far[name] else "nothing"
            parts.append(f"by {what} at most {most}")
    if not parts:
        return ""
    text = f"The largest relative distance from the oracle: {', '.join(parts)}."
    return text.replace("at most nothing", "none")


def off(gate: dict) -> list[float] | None:
    """The relative distance of each step's loss from the oracle's; None where it is not there."""
    exact = gate.get("oracle_losses")
    if not exact or len(exact) != len(gate["losses"]):
        return None
    return [abs(a - b) / abs(b) for a, b in zip(gate["losses"], exact, strict=True)]


def transcripts(folder: Path) -> list[list[dict]]:
    """The records of the whole trainings beside the folder: logs/MACHINE/*.jsonl.

    Not of Apex on a CPU, where it does nothing.
    """
    found = []
    for path in sorted(folder.resolve().parent.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if not lines or lines[0].get("event") != "start":
            continue
        idle = lines[0]["script"] == "mnmc_apex" and lines[0]["device_name"] == "cpu"
        if not idle and any(line["event"] == "eval" for line in lines):
            found.append(lines)
    return found


def accuracy_picture(run: Run) -> Picture | None:
    """Test accuracy by epoch of whole trainings, a panel for each data set."""
    panels: dict[str, list] = {}
    for lines in transcripts(run.folder):
        start = lines[0]
        images = start["dataset"]
        images = Path(start["data"]).name if images == "imagenet" else images
        panels.setdefault(images, []).append(lines)
    if not panels:
        return None
    figure = Figure(figsize=FREE, layout="constrained")
    drawn, parts = {}, []
    for axes, (images, runs) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        last = []
        for k, lines in enumerate(runs):
            script, world = f"{lines[0]['script']}.py", lines[0].get("world_size", 1)
            evals = [line for line in lines if line["event"] == "eval"]
            epochs, shares = zip(*((e["epoch"], 100 * e["accuracy"]) for e in evals), strict=True)
            style = look({"script": script, "world": world})
            width = 1 + 4 * (1 - k / len(runs))  # the later ones narrower: none is hidden
            (line,) = axes.plot(epochs, shares, linewidth=width, **style)
            drawn.setdefault(f"{script} x{world}" if world > 1 else script, line)
            last.append(shares[-1])
        ends = f"{min(last):.1f}%" if len(last) == 1 else f"{min(last):.1f}% to {max(last):.1f}%"
        parts.append(f"{ends} on {images}, {words.counted(len(epochs), 'epoch')}")
        axes.set_title(images)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
    figure.axes[0].set_ylabel("test accuracy, %")
    legend_below(figure, [*drawn.values()], [*drawn], 3)
    return Picture(figure, "Do all scripts learn equally well?", f"{'; '.join(parts)}.")


def code_picture(run: Run) -> Picture | None:
    """The ratio to the plain script against the lines that a script adds to it."""
    largest: dict[str, dict] = {}
    for row in run.with_a("ratio"):
        if row.get("claim"):
            before = largest.get(row.get("technique") or row["script"])
            if before is None or row["world"] > before["world"]:
                largest[row.get("technique") or row["script"]] = row
    added = {name: added_lines(row["script"]) for name, row in largest.items()}
    added = {name: lines for name, lines in added.items() if lines is not None}
    if len(added) < 2:
        return None
    figure = Figure(figsize=FREE, layout="constrained")
    axes, drawn = figure.subplots(), {}
    for name, lines in added.items():
        row = largest[name]
        style = look(row) | {"linestyle": "", "markersize": 8, "capsize": 3}
        drawn[row["case"]] = axes.errorbar(lines, row["ratio"], yerr=reach(row, "ratio"), **style)
    axes.axhline(1, color=MUTED, linewidth=1)
    axes.set_xlim(0, 1.06 * max(added.values()))
    axes.set_xlabel(f"lines that the script adds to {PLAIN}")
    axes.set_ylabel(f"images/s against {PLAIN}")
    axes.grid()
    legend_below(figure, [*drawn.values()], [*drawn], 3)
    few, many = min(added, key=added.get), max(added, key=added.get)
    answer = f"From {words.counted(added[few], 'line')} ({largest[few]['script']}) to "
    answer += f"{added[many]} ({largest[many]['script']}), each at the largest world size compared."
    return Picture(figure, "What does the speed cost in code?", answer)


def added_lines(script: str) -> int | None:
    """How many lines a script has more than the plain one lets stand; None where it is not here."""
    try:
        return counts(diff(PLAIN, script))[0]
    except RuntimeError:  # a script of another checkout
        return None


def scaling_picture(run: Run) -> Picture | None:
    """Speed-up by world size, from two sizes on, each process with a device of its own; beside it
    the efficiency against one rank.
    """
    rows = [row for row in run.with_a("ratio") if not row.get("technique")]
    rows = [row for row in rows if row["case"] not in (PLAIN, AGAIN)]
    sizes = sorted({row["world"] for row in rows})
    if len(sizes) < 2 or shared(run.known[0]):
        return None
    speed_up = {row["case"]: row["ratio"] for row in rows}
    share = {r["case"]: 100 * (1 - r["exposed_share"]) for r in rows if r.get("exposed_share")}
    figure = Figure(figsize=FREE, layout="constrained")
    panels = figure.subplots(1, 1 + bool(share), squeeze=False)[0]
    drawn = {}
    for k, script in enumerate(dict.fromkeys(row["script"] for row in rows)):
        mine = sorted((r for r in rows if r["script"] == script), key=lambda r: r["world"])
        style, shift = look(mine[-1]), 1 + 0.015 * (k - 2)  # else the marks would lie on each other
        for axes, values in zip(panels, (speed_up, share), strict=False):
            part = [row for row in mine if row["case"] in values]
            places = [row["world"] * shift for row in part]
            (line,) = axes.plot(places, [values[row["case"]] for row in part], **style)
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
    legend_below(figure, [*drawn.values()], [*drawn], 3)
    best = max((r for r in rows if r["world"] == sizes[-1]), key=lambda r: speed_up[r["case"]])
    kept = run.known[0]["plan"].get("scaling", "strong")
    stays = {"weak": "the local", "strong": "the global"}[kept]
    answer = f"{best['case']} reaches {speed_up[best['case']]:.2f} times the speed of {PLAIN} "
    answer += f"({kept} scaling: {stays} batch stays the same)."
    return Picture(figure, "What do more processes bring?", answer)
