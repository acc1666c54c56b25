"""The tables of docs/reference/launchers.md, over the records of `bench launchers`."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from bench.experiments.launchers import CASES, LAUNCHERS, OF_RANK_1
from bench.host import machine
from bench.show.claims import counted
from docs.make.logs import Part, Piece, lines_of, link, paragraph

PAGE = "docs/reference/launchers.md"


def outcome(record: dict) -> str:
    """What came of a case, in a table's cell."""
    if "skipped" in record:
        return record["skipped"]
    left = f"{counted(record['left'], 'rank')} left" if record["left"] else ""
    if record["code"] is None:
        return f"waits; {left}" if left else "waits, without its ranks"
    code = record["code"] if record["code"] >= 0 else 128 - record["code"]
    seconds = max(record["launcher_seconds"], record["ranks_seconds"] or 0)
    took = f"{seconds:.0f} s" if seconds >= 0.5 else "at once"
    return f"exit {code}; {left or took}"


def table(path: Path) -> Iterator[Piece]:
    """A row for each launcher; then the lines that name the rank."""
    first, *known = lines_of(path)
    found = {(record["launcher"], record["case"]): record for record in known}
    names = [name for name in LAUNCHERS if any(record["launcher"] == name for record in known)]
    gone = {name: found[name, "all"]["skipped"] for name in names if (name, "all") in found}
    names = [name for name in names if name not in gone]
    where = f"{machine(first['environment'])} ({link(path)})"
    left = "".join(f" {name} was left out: {reason}." for name, reason in gone.items())
    yield paragraph(
        f"""On {where}, other programs kept the cores busy, so the seconds are rough. A cell has the
        launcher's exit code, and the seconds until it and all ranks were gone, or the ranks that
        were left after {first["limit"]:.0f} s.{left}"""
    )
    rows = [[f"`{name}`", *(outcome(found[name, case]) for case in CASES)] for name in names]
    yield pd.DataFrame(rows, columns=["", *CASES])
    yield "The first line that names rank 1, which failed:"
    rows = []
    for name in names:
        lines = [(found[name, case].get("names") or [""])[0] for case in OF_RANK_1]
        rows.append([f"`{name}`", *(f"`{line[:70]}`" if line else "none" for line in lines)])
    yield pd.DataFrame(rows, columns=["", *OF_RANK_1])


PARTS = [Part(PAGE, "launchers", "effects/launchers.jsonl", table)]
