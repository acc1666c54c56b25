"""docs/learn/: what happened without the changes of ddp.md, and what map.md's plan prints."""

import io
from contextlib import redirect_stdout

from bench.experiments import model_fit as plan
from bench.ladder import DDP
from mistakes.page import parse
from mistakes.pieces import FOLDER, read, told

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
