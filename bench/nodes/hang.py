"""What the places of hanging ranks mean: who did not come to where the others wait."""

import ast
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<|/watched/sitecustomize\.py$")
PLUMBING = {"wrapper", "inner", "decorate_context", "<lambda>", "<module>"}  # of the libraries
CONNECTING = ("init_process_group", "DistributedDataParallel.__init__", "connectFullMesh")
ROLE = re.compile(r"rank|main_process|is_main|is_master|is_chief", re.I)
DIFFS, HOWTO = "docs/diffs", "docs/howto"
PAGES = {
    "if": f"{DIFFS}/mnmc_ddp_launch.md#10-collectives-under-if-rank--0",
    "loop": f"{DIFFS}/uneven_inputs.md",
    "except": f"{HOWTO}/hangs.md",
    "gone": f"{HOWTO}/troubleshooting.md#exitcode--9",
    "network": f"{HOWTO}/several-machines.md#network-interfaces",
    "missing": f"{HOWTO}/several-machines.md#rendezvous",
    None: f"{HOWTO}/hangs.md",
}


def innermost(stack: list) -> str | None:
    """The function of a library in which the user's innermost line waits, and its file."""
    for file, _, name in stack:
        if not LIBRARY.search(file):
            return None
        last = name.rpartition(".")[2]
        if re.search("/(torch|horovod)/", file) and last not in PLUMBING and last[0] != "_":
            return f"{name} ({re.sub(r'.*-packages/', '', file)})"
    return None


def lines_of(stack: list) -> list[dict]:
    """The user's own lines on a stack, the innermost one first: where, and what is around it."""
    found = []
    for file, number, _ in stack:
        if not LIBRARY.search(file):
            near = os.path.relpath(file)
            name = file if near.startswith("..") else near
            found.append({"at": f"{name}:{number}", "inside": around(file, number)})
    return found


def around(file: str, number: int) -> list[list]:
    """The conditions on the rank, the handlers and the loops that a line is in: kind and text.

    Loops by their file and line, so that those of two ranks can be compared.
    """
    found, conditions = [], ast.If | ast.IfExp
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(Path(file).read_text())):
            body = getattr(node, "body", [])  # of a condition in an expression, it is one
            body = [*body, *getattr(node, "orelse", [])] if isinstance(body, list) else [body]
            if not any(each.lineno <= number <= each.end_lineno for each in body):
                continue
            if isinstance(node, conditions) and ROLE.search(ast.unparse(node.test)):
                found.append(["if", f"`if {ast.unparse(node.test)}`"])
            elif isinstance(node, ast.ExceptHandler):
                found.append(["except", "an exception handler"])
            elif isinstance(node, ast.For | ast.While | ast.AsyncFor):
                found.append(["loop", f"the loop at {Path(file).name}:{node.lineno}"])
    return found


def inside(rank: dict, kind: str) -> list[tuple[str, str]]:
    """A rank's lines that are in something of a kind, and in what; the innermost line first."""
    return [(line["at"], text) for line in rank["lines"] for k, text in line["inside"] if k == kind]


def span(numbers: Iterable[int]) -> str:
    """0-3, 5"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def named(ranks: list[dict]) -> str:
    """Ranks with their hosts."""
    hosts: dict[str, list] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], []).append(rank["rank"])
    parts = []
    for host, numbers in hosts.items():
        if None in numbers:
            parts.append(f"no rank yet on {host}")
        else:
            parts.append(f"rank{'s' * (len(numbers) > 1)} {span(numbers)} on {host}")
    return " and ".join(parts)


def doing(rank: dict) -> str:
    """What a rank does, in words."""
    if rank["how"] == "ended":
        return f"ended: {rank['ended']}"
    words = {"gone": "killed, or ended by os._exit", "lost": "its machine is silent"}
    if rank["how"] in words:
        return words[rank["how"]]
    at = rank["lines"][0]["at"] if rank["lines"] else "no line of the program"
    stopped = rank["how"] == "stopped"
    text = f"stopped by a signal, last seen at {at}" if stopped else f"waits at {at}"
    text += f" in {rank['in']}" if rank["in"] else ""
    for line in rank["lines"][1:2]:
        text += f", called at {line['at']}"
    return text + (f"; last collective {rank['last']}" if rank.get("last") else "")


def groups(ranks: list[dict]) -> list[list[dict]]:
    """Ranks that do the same."""
    found: dict[str, list] = {}
    for rank in ranks:
        found.setdefault(doing(rank), []).append(rank)
    return [*found.values()]


def odd(ranks: list[dict], missing: list[int]) -> tuple[str, str | None]:
    """Who did not come, in words; and the key of PAGES."""
    waits = [rank for rank in ranks if rank["how"] == "waits"]
    mesh = [r for r in ranks if "connectFullMesh" in r.get("ended", "")]
    connects = [r for r in waits if any(f"{n} (" in (r["in"] or "") for n in CONNECTING)]
    gone = [rank for rank in ranks if rank["how"] in ("gone", "lost")]
    if gone:
        return f"{named(gone)}: dead, and the others wait for it", "gone"
    if missing:
        some = f"rank{'s' * (len(missing) > 1)} {span(missing)}"
        return f"{some}: no watcher saw any of it: not started, or not watched", "missing"
    if stopped := [rank for rank in ranks if rank["how"] == "stopped"]:
        return f"{named(stopped)}: stopped; kill -CONT lets it go on", None
    if mesh or (connects and len(connects) == len(waits)):
        return "all wait while they connect: check the network by bench doctor", "network"
    if ended := [rank for rank in ranks if rank["how"] == "ended"]:
        kind = "loop" if "its program ended" in (r["ended"] for r in ended) else None
        return f"{named(ended)}: ended, and the others wait for it", kind
    return apart(ranks)


def apart(ranks: list[dict]) -> tuple[str, str | None]:
    """The same, of ranks that all wait: by what is around their lines, else the fewest."""
    places: dict[str, list] = {}
    for rank in ranks:
        places.setdefault(str([line["at"] for line in rank["lines"]]), []).append(rank)
    if len(places) == 1:
        return "all ranks wait in the same line: the network, or a rank's own thread", "network"
    for kind, what in (("except", "in"), ("if", "under")):
        here = [mine for mine in places.values() if inside(mine[0], kind)]
        if here and len(here) < len(places):
            mine = min(here, key=len)
            at, text = inside(mine[0], kind)[0]
            return f"{named(mine)}: {at} is {what} {text}, where the others don't come", kind
    loops = {str(mine): {text for _, text in inside(mine[0], "loop")} for mine in places.values()}
    for loop in sorted(set().union(*loops.values())):
        out = [r for mine in places.values() if loop not in loops[str(mine)] for r in mine]
        if out:
            return f"{named(out)}: has left {loop}, in which the others wait: fewer batches", "loop"
    fewest = min(places.values(), key=len)
    if 2 * len(fewest) == len(ranks):
        return "the ranks wait in different lines: some don't come to a collective", None
    under = "".join(f", under {text}" for _, text in inside(fewest[0], "if")[:1])
    return f"{named(fewest)}: not where the others wait{under}", "if" if under else None


def report(ranks: list[dict], missing: list[int], seconds: float) -> str:
    """The report. missing: the ranks that no watcher saw."""
    lines = [f"watch: nothing moved for {seconds:.0f} s"]
    lines += [f"  {named(same)}: {doing(same[0])}" for same in groups(ranks)]
    text, kind = odd(ranks, missing)
    return "\n".join([*lines, f"Odd one out: {text}.", f"Read {PAGES[kind]}"])
