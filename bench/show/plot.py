"""Draws the pictures of a run, from its records alone: PNG files, and SVG for the page.

In the SVG every colour is a variable of report.css, so that the page has them light and dark.
"""

import io
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import matplotlib
from matplotlib.transforms import Bbox

from bench import records
from bench.show import details, figures, words
from bench.show.looks import STYLE, THEMED, Picture, Run
from bench.show.summary import by_case, title, usable

PICTURES = {
    "throughput": figures.throughput_picture,
    "ratios": figures.ratios_picture,
    "loss": figures.loss_picture,
    "accuracy": figures.accuracy_picture,
    "code": figures.code_picture,
    "scaling": figures.scaling_picture,
    "steps": details.steps_picture,
    "shares": details.shares_picture,
    "memory": details.memory_picture,
    "drift": details.drift_picture,
}

matplotlib.rcParams |= STYLE
ABOVE, BELOW = 0.32, 0.36  # inches of a PNG, for its question and for where it was measured
_run: list[Run] = []  # in the processes that draw


def svg(picture: Picture) -> str:
    """The figure as an element of a page, its colours as variables."""
    file = io.StringIO()
    empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    picture.figure.savefig(file, format="svg", transparent=True, metadata=empty)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    for name, colour in THEMED.items():
        text = text.replace(colour, f"var(--plot-{name})")
    return re.sub(r"\n\s*", "\n", text).strip()


def png(picture: Picture, known: list[dict], path: Path) -> None:
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
    text = title(known) + ("" if known[0]["environment"]["gpus"] else f"\n{words.CPU}")
    figure.text(0.01, down, text, fontsize=7, color=THEMED["muted"], va="top")
    part = path.with_name(path.stem + ".part.png")
    try:
        figure.savefig(part, dpi=120, bbox_inches=whole, pil_kwargs={"compress_level": 4})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _as_png(name: str) -> Path | None:
    """One file, in a process that draws; None where there is nothing to show."""
    (run,), path = _run, _run[0].folder / f"{name}.png"
    picture = PICTURES[name](run)
    if picture is None:
        path.unlink(missing_ok=True)  # of an earlier call
        return None
    png(picture, run.known, path)
    return path


def _as_svg(name: str) -> tuple[str, str, str, str] | None:
    """One element of a page, in a process that draws: name, SVG, question and answer."""
    picture = PICTURES[name](_run[0])
    return picture and (name, svg(picture), picture.question, picture.answer)


def drawn(run: Run, draw, meanwhile=lambda: None) -> tuple[list, object]:
    """What draw makes of each picture's name, those left out that have nothing to show; and what
    meanwhile returns, which this process calls while others draw.
    """
    # Forked, since what is inherited need not be copied: two at once take half the time.
    setting = {"mp_context": get_context("fork"), "initializer": _run.append, "initargs": (run,)}
    with ProcessPoolExecutor(2, **setting) as pool:
        jobs = [pool.submit(draw, name) for name in PICTURES]
        other = meanwhile()
        return [done for job in jobs if (done := job.result())], other


def elements(run: Run, meanwhile) -> tuple[list[tuple[str, str, str, str]], object]:
    """The pictures for the page, in order: name, SVG, question and answer of each; and what
    meanwhile returns.
    """
    return drawn(run, _as_svg, meanwhile)


def write(folder: Path, read: tuple | None = None) -> list[Path]:
    """Makes the plots of a folder's records, and returns their paths.

    read: what records.measured gives, where it is there already. Raises records.BadRecords.
    """
    known = usable((read or records.measured(folder))[0])
    return drawn(Run(known, by_case(known), folder), _as_png)[0]
