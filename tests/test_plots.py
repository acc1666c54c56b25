"""The plots of a made-up run: which there are, what they show, and that they go with the page."""

import re
import subprocess
import sys
import xml.etree.ElementTree as tree

import made_up
import pytest
from support import ROOT

from bench import records
from bench.ladder import GROUPS, in_group
from bench.show import plot
from bench.show.style import COLOURS, THEMED
from bench.show.summary import Run, timed

RATES = {"mnmc_ddp_launch.py x2": 800, "mnmc_horovod.py x2": 600}


def run(folder, blocks=8, change=None, **more) -> Run:
    """A made-up run as the plots take it; change: what to do to its records before."""
    known = made_up.run(folder, RATES, blocks, **more)
    if change:
        change(known)
        made_up.write(folder, known)
    return Run.of(folder)


def texts(picture) -> list[str]:
    """All words of a figure."""
    figure = picture.figure
    figure.draw_without_rendering()
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    found += [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    return found + [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_ratio_stands_on_each_bar_and_a_script_has_one_colour(tmp_path):
    """The ratio of the table, and 1 for the plain script; no two of a result have one colour."""
    made = run(tmp_path)
    shown = texts(picture := plot.PICTURES["throughput"](made))
    for row in timed(made.rows):
        assert row["case"] == "snsc.py" or f"{row['ratio']:.2f}" in shown
    assert "1" in shown and "snsc.py" in shown
    bars = [bar.get_facecolor() for bar in picture.figure.axes[0].patches]
    pairs = {(row["script"], bar) for row, bar in zip(timed(made.rows), bars, strict=True)}
    assert len(pairs) == len({script for script, _ in pairs}) == len({bar for _, bar in pairs})
    for group in map(in_group, GROUPS):
        names = ["snsc.py", "mnmc_ddp_launch.py", *group]
        assert len({COLOURS[name] for name in names}) == len(names)


def test_scaling_needs_two_world_sizes_and_shares_a_rank_alone(tmp_path):
    """Else they would show nothing."""
    two = run(tmp_path / "two", sizes=[2])
    assert plot.PICTURES["scaling"](two) is None and plot.PICTURES["shares"](two) is None
    four = run(tmp_path / "four", sizes=[1, 2, 4, 8], gpus=["a GPU"] * 8)
    (axes,) = plot.PICTURES["scaling"](four).figure.axes
    assert [1, 2, 4, 8] in [list(line.get_ydata()) for line in axes.lines]  # the ideal
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4", "8"]

    def alone(known):
        case = next(c for c in known[0]["cases"] if c["name"] == "snsc.py")
        known[0]["cases"].append(case | {"name": "one rank of 2 alone", "share": 2})
        for r in records.of(known, "sample"):
            if r["case"] == "snsc.py":
                known.append(r | {"case": "one rank of 2 alone"})

    figure = plot.PICTURES["shares"](run(tmp_path / "alone", change=alone)).figure
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names and all(name.endswith("x2") for name in names)
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches]
    assert max(ends) == pytest.approx(100)


def test_the_page_has_every_colour_of_a_plot_light_and_dark(tmp_path):
    """An SVG has no colour of its own, and the style sheet gives it one of each kind twice."""
    css = (ROOT / "bench" / "show" / "report.css").read_text()
    for name in THEMED:
        assert len(set(re.findall(f"--plot-{name}: (#[0-9a-f]{{6}});", css))) == 2, name
    for name, colour in THEMED.items():
        assert f"--plot-{name}: {colour};" in css
    made = plot.pictures(run(tmp_path))
    for name, picture in made.items():
        svg = plot.svg(picture.figure)
        assert tree.fromstring(svg).tag.endswith("svg")
        assert not re.findall(r"#[0-9a-f]{6}\b(?![^<]*</text>)", svg.replace("#ffffff", "")), name
    assert {*made} == {"throughput", "ratios", "scaling"}


def test_the_command_says_what_it_wrote_and_takes_old_plots_away(tmp_path):
    """A plot that a folder has nothing for is no picture of it."""
    made_up.run(tmp_path, RATES, 2)
    (tmp_path / "shares.png").write_bytes(b"of an earlier call")
    words = [sys.executable, "-m", "bench", "table", tmp_path]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr
    written = done.stdout.splitlines()[-1].removeprefix(f"{tmp_path}: ").split(", ")
    assert {*written} == {path.name for path in tmp_path.iterdir()}
    assert {"table.md", "table.csv", "report.html", "throughput.png"} < {*written}
    assert not (tmp_path / "shares.png").exists() and not list(tmp_path.glob("*.part*"))
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
