"""Writes report.html: a result's table, plots, environment and records on one page.

Everything stands in the page itself, so it can be mailed and opened without a network. It has no
script; its policy forbids the browser to run one or to load anything.
"""

import base64
import gzip
import json
import re
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from bench import records
from bench.show import plot, table
from bench.show.claims import legend, verdict
from bench.show.summary import Run, timed, title

NAME = "report.html"
HERE = Path(__file__).resolve().parent


def write(run: Run) -> None:
    """Makes report.html."""
    rows = sorted(timed(run.rows), key=lambda row: -row["images_per_second"])
    setting = run.known[0]
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=1)
    text = environment.get_template(NAME).render(
        heading=title(run.known),
        verdict=verdict(run.rows),
        when=when(run.known),
        command=setting["command"],
        tables=[table.cells(rows, part) for part in (table.FEW, [table.FEW[0], *table.MORE])],
        explained={column.name: column.explained for column in (*table.FEW, *table.MORE)},
        number=re.compile(r"[\d.,]+%?$").match,
        legend=legend(run),
        pictures=plot.pictures(run),
        svg=plot.svg,
        facts={"Machine and versions": setting["environment"], "Plan of the run": setting["plan"]},
        packed=base64.b64encode(gzip.compress((run.folder / records.NAME).read_bytes())).decode(),
        css=(HERE / "report.css").read_text(),
    )
    # ASCII, so that the page reads the same whatever the locale that writes or serves it.
    records.write_whole(run.folder / NAME, text.encode("ascii", "xmlcharrefreplace").decode())


def when(known: list[dict]) -> str:
    """When the first turn began, in UTC, and the minutes from there until the last one ended."""
    samples = records.of(known, "sample")
    begin, last = samples[0]["begin"], samples[-1]
    day = datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{day}, {(last['begin'] + last['conditions']['wall'] - begin) / 60:.0f} minutes"
