"""Prints tables on the terminal: the cases, what this machine has, and a result."""

import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import backends, cases, records
from bench import host as hosts
from bench.cases import Case
from bench.host import Host, machine
from bench.ladder import GROUPS
from bench.options import EXTRAS


def show(heading: str, columns: dict[str, list[str]], width: int | None = None) -> None:
    """Prints a table; columns: the texts of each, by its name."""
    table = Table(title=heading)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    Console(width=width).print(table)


def list_cases(host: Host, rows: list[Case]) -> None:
    """Prints the cases, each with whether it runs here, and what keeps cases from running."""
    here = ["does not run" if backends.missing(case, host) else "runs" for case in rows]
    columns = {"case": [case.name for case in rows], "launcher": [case.launcher for case in rows]}
    columns |= {"world size": [str(case.world) for case in rows], "here": here}
    show(f"cases on {machine(host.record())}", columns)
    print_missing(host, rows)


def print_missing(host: Host, rows: list[Case]) -> None:
    """Prints what keeps cases from running here, and what to type."""
    lines = backends.lacking(rows, host)
    if host.unusable:
        lines.append(f"a torch for {', '.join(host.unusable)}: update the driver, or set PYTHON")
    if host.gpus and not host.driver:
        lines.append("nvidia-ml-py, without which clocks and throttling of GPUs stay unknown")
    for line in lines:
        print(f"missing: {line}")
    if names := [name for name in EXTRAS if f"--with {name}" in " ".join(lines)]:
        print(f"to set up what can be: bash bench/run_all.sh --with {','.join(names)}")
    if not lines:
        print("nothing is missing")


def doctor() -> None:
    """The command of this name: what this machine is, and what it lacks."""
    host = hosts.look()
    rows = cases.cases(host, cases.worlds(host))
    from rich import print_json

    print_json(data=host.record())
    print_missing(host, [*rows, *cases.techniques(host, max(cases.worlds(host)), GROUPS)])


def print_result(folder: Path) -> None:
    """Writes the table, the plots and the page of a folder, and prints the table."""
    from bench.show import plot, report, table

    read = records.measured(folder)
    heading, columns, lines = table.write(folder, read)
    paths = [*plot.write(folder, read), report.write(folder, read)]
    show(heading, columns, None if sys.stdout.isatty() else 160)
    for line in lines:
        print(line)
    names = [records.NAME, "table.md", "table.csv", *(path.name for path in paths)]
    print(f"{folder}: {', '.join(names)}")


def make_again(what: str, folder: Path) -> None:
    """Makes the table, the plots ("plot") or the page ("report") of a folder again; says which
    files it wrote, and which records are lost.
    """
    read = records.measured(folder)
    made = import_module(f"bench.show.{what}").write(folder, read)
    tables = [path for path in sorted(folder.glob("table*")) if path.suffix in (".md", ".csv")]
    for path in {"table": tables, "plot": made, "report": [made]}[what]:
        print(path)
    say_lost(read[1])


def say_lost(warning: str | None) -> None:
    """Says on stderr that records are lost."""
    if warning:
        print(f"bench: {warning}", file=sys.stderr)
