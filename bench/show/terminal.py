"""Tables on the terminal: the cases, and a result."""

import sys
from pathlib import Path

from bench import backends, extras, records
from bench.cases import Case
from bench.host import Host, machine


def cases(rows: list[Case], host: Host) -> None:
    """The cases, each with what keeps it from running here."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"cases on {machine(host.record())}")
    for column in ("case", "launcher", "world size", "here"):
        table.add_column(column, overflow="fold")
    for case in rows:
        here = "runs" if not backends.missing(case, host) else "does not run"
        table.add_row(case.name, case.launcher, str(case.world), here)
    Console().print(table)
    missing(rows, host)


def missing(rows: list[Case], host: Host) -> None:
    """What keeps cases from running here, and what to type."""
    lines = backends.lacking(rows, host)
    if host.unusable:
        lines.append(f"a torch for {', '.join(host.unusable)}: update the driver, or set PYTHON")
    if host.gpus and not host.driver:
        lines.append("nvidia-ml-py, without which clocks and throttling of GPUs stay unknown")
    for line in lines:
        print(f"missing: {line}")
    if names := [name for name in extras.NAMES if f"--with {name}" in " ".join(lines)]:
        print(f"to set up what can be: bash bench/run_all.sh --with {','.join(names)}")
    if not lines:
        print("nothing is missing")


def doctor(rows: list[Case], host: Host) -> None:
    """What was found on this machine, what is missing, and what to type."""
    from rich import print_json

    print_json(data=host.record())
    missing(rows, host)


def result(folder: Path) -> None:
    """Writes the table, the plots and the page of a folder, and prints the table."""
    from rich.console import Console
    from rich.table import Table

    from bench.show import plot, report
    from bench.show import table as tables

    read = records.measured(folder)
    heading, frame, lines = tables.write(folder, read)
    paths = [*plot.write(folder, read), report.write(folder, read)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=heading)
    for column in frame.columns:
        table.add_column(column, justify="left" if column == "case" else "right", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*map(str, row))
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    names = [records.NAME, "table.md", "table.csv", *(path.name for path in paths)]
    console.print(f"{folder}: {', '.join(names)}", highlight=False, markup=False)


def again(what: str, folder: Path) -> None:
    """Makes the table, the plots ("plot") or the page ("report") of a folder again; says which
    files it wrote, and which records are lost.
    """
    from importlib import import_module

    read = records.measured(folder)
    made = import_module(f"bench.show.{what}").write(folder, read)
    tables = [path for path in sorted(folder.glob("table*")) if path.suffix in (".md", ".csv")]
    for path in {"table": tables, "plot": made, "report": [made]}[what]:
        print(path)
    if read[1]:
        print(f"bench: {read[1]}", file=sys.stderr)
