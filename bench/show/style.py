"""Gives plots their looks: colours, marks, and figures with a row for each case.

The colours are those of Okabe and Ito (2008), which the colour-blind tell apart; marks and places
say the same. report.css gives each of them another one in the dark.
"""

from dataclasses import dataclass

from matplotlib.figure import Figure

from bench import stats
from bench.ladder import GROUPS, LADDER, in_group

THEMED = {  # by their names in report.css
    "ink": "#1b1f24",
    "muted": "#57606a",
    "line": "#d5dae0",
    "pale": "#eceff2",
    "grey": "#7b848d",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "yellow": "#e69f00",
    "sky": "#56b4e9",
    "pink": "#cc79a7",
}
INK, MUTED, LINE, PALE, GREY, BLUE, ORANGE, GREEN, YELLOW, SKY, PINK = THEMED.values()
# One colour a script or technique, in all plots; no group of them has two of the same.
COLOURS = (GREY, YELLOW, BLUE, SKY, GREEN, PINK, ORANGE)
COLOURS = {script.path: colour for script, colour in zip(LADDER, COLOURS, strict=True)}
MARKS = dict(zip(COLOURS, "oPsD^vX", strict=True))
FURTHER = (SKY, YELLOW, PINK, GREEN, ORANGE, INK, MUTED)  # beside the plain script's and DDP's
for group in GROUPS:
    COLOURS |= dict(zip(in_group(group), FURTHER, strict=False))
CONTROL = "the control, and its interval"
CLAIMS = {  # colour, mark, filling
    "faster": (BLUE, ">", BLUE),
    "slower": (ORANGE, "<", ORANGE),
    stats.UNCLEAR: (GREY, "o", GREY),
    stats.NOTHING: (GREY, "o", "none"),
    CONTROL: (INK, "D", "none"),
}
STYLE = {  # matplotlib's settings
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "system-ui"],
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "path.simplify_threshold": 0.05,
}
BELOW = "outside lower center"  # a legend's place, where it can hide nothing
ROWS, FREE = (7.2, 0.33), (7.2, 3.8)  # inches: width and height a row; width and height


@dataclass(frozen=True)
class Picture:
    """A figure, and the question that it answers."""

    figure: Figure
    question: str


def colour(row: dict) -> str:
    """The colour of a row's technique, or script."""
    return COLOURS.get(row.get("technique") or row["script"], INK)


def row_by_row(rows: list[dict], columns: int = 1):
    """A figure with a named row for each case, the first on top; and its axes."""
    width, height = ROWS
    figure = Figure(figsize=(width, 1.1 + height * len(rows)), layout="constrained")
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    figure.get_layout_engine().set(wspace=0.06)
    axes[0].set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    for each in axes:
        each.tick_params(axis="y", length=0)
        each.grid(axis="x")
    return figure, axes


def reach(row: dict, key: str) -> list[list[float]] | None:
    """How far an interval goes to the left and to the right, as errorbar takes it."""
    if row.get(f"{key}_low") is None:
        return None
    return [[row[key] - row[f"{key}_low"]], [row[f"{key}_high"] - row[key]]]
