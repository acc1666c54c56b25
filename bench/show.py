"""Tables on the terminal: the cases, and a result."""

import sys
from pathlib import Path

from bench import backends
from bench.cases import Case
from bench.host import Host, machine
from bench.results import records


def cases(rows: list[Case], host: Host) -> None:
    """The cases, each with what keeps it from running here."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"cases on {machine(host.record())}")
    for column in ("case", "launcher", "world size", "here"):
        table.add_column(column, overflow="fold")
    for case in rows:
        here = backends.missing(case, host) or "runs"
        table.add_row(case.name, case.launcher, str(case.world), here)
    Console().print(table)


def result(folder: Path) -> None:
    """Writes the table and the plots of a folder, and prints the table."""
    from rich.console import Console
    from rich.table import Table

    from bench.results import plot, report
    from bench.results import table as tables

    heading, frame, remarks = tables.write(folder)
    paths = [*plot.write(folder), report.write(folder)]
    frame = frame[[name for name in frame.columns if name in tables.NARROW]]
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=heading)
    for column in frame.columns:
        table.add_column(column, justify="left" if column == "case" else "right", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*map(str, row))
    console.print(table)
    for line in remarks:
        console.print(line, highlight=False)
    written = ", ".join([records.NAME, "table.md", "table.csv", *(path.name for path in paths)])
    console.print(f"{folder}: {written}", highlight=False)
