"""Prints tables on the terminal: the cases, what this machine has, and a result."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import backends, cases
from bench import host as hosts
from bench.cases import Case
from bench.host import Host, machine
from bench.ladder import GROUPS
from bench.options import EXTRAS
from bench.show.claims import legend, verdict
from bench.show.summary import Run, timed, title


def show(heading: str, rows: list[list[str]], width: int | None = None) -> None:
    """Prints a table; the first row names the columns."""
    table, (head, *body) = Table(title=heading), rows
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    Console(width=width).print(table)


def list_cases(host: Host, rows: list[Case]) -> None:
    """Prints the cases, each with whether it runs here, and what keeps cases from running."""
    texts = [["case", "launcher", "world size", "here"]]
    for case in rows:
        here = "does not run" if backends.missing(case, host) else "runs"
        texts.append([case.name, case.launcher, str(case.world), here])
    show(f"cases on {machine(host.record())}", texts)
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
    """Writes the table, the plots and the page of a folder's records, and prints the table."""
    from bench.show import plot, report, table

    run = Run.of(folder)
    for part in (table, plot, report):
        part.write(run)
    texts = table.cells(timed(run.rows), table.FEW)
    show(title(run.known), texts, None if sys.stdout.isatty() else 160)
    print("\n- ".join([verdict(run.rows), *legend(run)]))
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
