"""Writes report.html: a result's table, plots, environment and records on one page.

Everything stands in the page itself, so it can be mailed, archived and opened without a network. It
has no script; its policy forbids the browser to run one or to load anything.
"""

import base64
import gzip
import json
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from bench import records
from bench.show import plot, table, words
from bench.show.summary import by_case, title, usable

NAME = "report.html"
HERE = Path(__file__).resolve().parent
CARRIED = 1_500_000  # characters of base64; a file that needs more is not put into the page


def carried(path: Path) -> dict:
    """A file of the folder for the page: its name, its kB, and its gzip in base64, or None where
    that is too large.
    """
    raw = path.read_bytes()
    packed = base64.b64encode(gzip.compress(raw, mtime=0)).decode()
    kept = packed if len(packed) <= CARRIED else None
    return {"name": path.name, "kb": len(raw) / 1000, "packed": kept}


def write(folder: Path, read: tuple | None = None) -> Path:
    """Makes report.html of a folder's records and of its table.csv; returns its path.

    read: what records.measured gives, where it is there already. Raises UserError.
    """
    known, warning = read or records.measured(folder)
    kept = usable(known)
    rows = by_case(kept)
    timed = sorted(words.timed(rows), key=lambda row: -row["images_per_second"])
    drawn = plot.pictures(plot.Run(kept, rows, folder))
    files = [path for name in (records.NAME, "table.csv") if (path := folder / name).is_file()]
    setting = known[0]
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=1)
    text = environment.get_template(NAME).render(
        heading=title(known),
        sentence=words.sentence(rows),
        when=words.when(known),
        command=setting["command"],
        tables=[table.cells(timed, part) for part in (table.FEW, [table.FEW[0], *table.MORE])],
        explained={column.name: column.explained for column in (*table.FEW, *table.MORE)},
        rows=lambda texts: zip(*texts.values(), strict=True),
        number=re.compile(r"[\d.,]+%?$").match,
        notes=words.notes(known, kept, rows, warning),
        pictures=drawn,
        svg=plot.svg,
        facts={"Machine and versions": setting["environment"], "Plan of the run": setting["plan"]},
        files=map(carried, files),
        css=(HERE / "report.css").read_text(),
    )
    # ASCII, so that the page reads the same whatever the locale that writes or serves it.
    table.replace(folder / NAME, text.encode("ascii", "xmlcharrefreplace").decode())
    return folder / NAME
