"""Draws the pictures of a run, from its records alone: PNG files, and SVG for the page.

In the SVG every colour is a variable of report.css, so that the page has them light and dark.
"""

import io
import re
import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from bench.show import figures
from bench.show.style import STYLE, THEMED, Picture
from bench.show.summary import Run, title
from bench.show.verdict import CPU

PICTURES = {
    "throughput": figures.throughput_picture,
    "ratios": figures.ratios_picture,
    "scaling": figures.scaling_picture,
    "shares": figures.shares_picture,
}

matplotlib.rcParams |= STYLE
ABOVE, BELOW = 0.32, 0.48  # inches of a PNG, for its question and for where it was measured
CAPTION = 112  # characters in a line of the latter


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
    for name, colour in THEMED.items():
        text = text.replace(colour, f"var(--plot-{name})")
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
    part = path.with_name(path.name + ".part")
    try:
        options = {"format": "png", "pil_kwargs": {"compress_level": 4}}
        figure.savefig(part, dpi=120, bbox_inches=whole, **options)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write(run: Run) -> None:
    """Makes the plots; those of an earlier call go."""
    drawn = pictures(run)
    for old in run.folder.glob("*.png"):
        if old.stem not in drawn:
            old.unlink()
    for name, picture in drawn.items():
        png(picture, run, run.folder / f"{name}.png")
