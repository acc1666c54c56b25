"""docs/learn/: what happened without the changes of ddp.md, map.md's plan, and all scripts."""

import io
from contextlib import redirect_stdout
from pathlib import Path

from bench.diffs import counts, diff
from bench.lab import plan
from bench.ladder import DDP, LADDER, PLAIN, TECHNIQUES
from bench.pages.page import parse
from bench.pages.pieces import FOLDER, read, told

NAME = DDP.removesuffix(".py")
PIECES = ("who", "group", "batch", "sampler", "order", "forward", "sums", "buffers", "metrics")
EXAMPLE = "--params 7e9 --gpus 8 --memory 40"


def outcome(piece: str) -> str:
    """What the page of the whole diff says of a piece."""
    page = parse(FOLDER / f"{NAME}.md")
    return told(page, page.pieces[piece], read(FOLDER)[NAME][piece])


def example() -> str:
    """The command of EXAMPLE and what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        plan.main(EXAMPLE.split())
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    shown = "\n".join(line for line in lines if line)
    return f"```bash\npython -m bench plan {EXAMPLE}\n```\n\n```text\n{shown}\n```"


def tree(parent: str = PLAIN, indent: str = "") -> str:
    """The scripts below a parent, each with the lines that its diff adds, and those below it."""
    lines = []
    for script in (script for script in [*LADDER, *TECHNIQUES] if script.parent == parent):
        added, _ = counts(diff(parent, script.path))
        lines.append(f"{indent}- [{script.path}](../diffs/{Path(script.path).stem}.md) +{added}")
        lines += filter(None, [tree(script.path, f"{indent}  ")])
    return "\n".join(lines)
