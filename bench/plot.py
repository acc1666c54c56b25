"""throughput.png and scaling.png of a run, from its records alone.

Readable in grey and by the colour-blind: marks and hatches tell the series apart, not only colour
(the palette is Okabe and Ito's, 2008).
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench import records
from bench.cases import PLAIN
from bench.run import speeds_by_round
from bench.table import tidy, title

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
MARKS = ["o", "s", "^", "D", "v", "P", "X"]


def caption(figure, known: list[dict]) -> None:
    """The machine, data and versions, below the plot."""
    text = title(known)
    if not known[0]["environment"]["gpus"]:
        text += "\nA plot from a CPU does not predict the order on GPUs."
    figure.supxlabel(text, fontsize=7, color="#444444", wrap=True)


def save(figure, path: Path) -> None:
    """Writes the picture whole, or leaves the old one."""
    part = path.with_name(path.stem + ".part.png")
    figure.savefig(part, dpi=150)
    plt.close(figure)
    part.replace(path)


def throughput_plot(known: list[dict], path: Path) -> None:
    """Images/s of each case: the median, its 95% interval, and every round as a point."""
    frame, speeds = tidy(known), speeds_by_round(known)
    frame = frame[::-1].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.42 * len(frame)), layout="constrained")
    good = frame["images_per_second"].notna()
    scale = frame["images_per_second"].max() if good.any() else 1.0
    for place, row in frame.iterrows():
        if not good[place]:
            axes.text(
                0.01 * scale, place, row["status"][:95], va="center", fontsize=7, color="#555555"
            )
            continue
        value = row["images_per_second"]
        errors = [[value - row["images_per_second_low"]], [row["images_per_second_high"] - value]]
        plain = row["script"] == PLAIN
        axes.barh(
            place,
            value,
            height=0.62,
            color="#DDDDDD" if plain else "#9CC9E4",
            edgecolor="#333333",
            hatch="//" if plain else "",
            linewidth=0.6,
        )
        axes.errorbar(value, place, xerr=errors, color="black", capsize=3, linewidth=1.2)
        rounds = list(speeds[row["case"]].values())
        axes.plot(rounds, [place] * len(rounds), ".", color="#D55E00", markersize=4, alpha=0.7)
    axes.set_yticks(range(len(frame)), frame["case"], fontsize=8)
    axes.set_ylim(-0.6, len(frame) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("images/s: median and 95% interval; each round is a point")
    axes.set_title("Throughput at the same global batch")
    axes.spines[["top", "right"]].set_visible(False)
    caption(figure, known)
    save(figure, path)


def scaling_plot(known: list[dict], path: Path) -> None:
    """Strong scaling: the ratio to the plain script against the world size, global batch fixed."""
    frame = tidy(known)
    frame = frame[frame["ratio"].notna()]
    figure, axes = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    sizes = sorted({1, *frame["world"]})
    devices = known[0]["environment"]["gpus"]  # a CPU's cores are all at work in the plain script
    ideal, word = (sizes, "ideal") if devices else ([1] * len(sizes), "ideal: the same cores")
    axes.plot(sizes, ideal, "--", color="#888888", linewidth=1, label=word)
    scripts = [s for s in dict.fromkeys(frame["script"]) if s != PLAIN]
    for k, script in enumerate(scripts):
        rows = frame[frame["script"] == script].sort_values("world")
        shift = 1 + 0.02 * (k - (len(scripts) - 1) / 2)  # else the marks would lie on each other
        errors = [rows["ratio"] - rows["ratio_low"], rows["ratio_high"] - rows["ratio"]]
        axes.errorbar(
            rows["world"] * shift,
            rows["ratio"],
            yerr=errors,
            color=COLOURS[k % len(COLOURS)],
            marker=MARKS[k % len(MARKS)],
            capsize=3,
            linewidth=1.2,
            label=script,
        )
    axes.axhline(1, color="#BBBBBB", linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("world size")
    axes.set_ylabel(f"speed-up over {PLAIN}, and its 95% interval")
    axes.set_title("Strong scaling: the global batch stays the same")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    caption(figure, known)
    save(figure, path)


def write(folder: Path) -> list[Path]:
    """Makes the plots of a folder's records, and returns their paths.

    Raises records.BadRecords.
    """
    known, _ = records.read(folder)
    paths = [folder / "throughput.png", folder / "scaling.png"]
    throughput_plot(known, paths[0])
    scaling_plot(known, paths[1])
    return paths
