"""docs/learn/ddp.md: what happened without the changes that it shows."""

from bench.ladder import DDP
from bench.pages.page import parse
from bench.pages.pieces import FOLDER, read, told

NAME = DDP.removesuffix(".py")
PIECES = ("who", "group", "batch", "sampler", "order", "forward", "sums", "buffers", "metrics")


def outcome(piece: str) -> str:
    """What the page of the whole diff says of a piece."""
    page = parse(FOLDER / f"{NAME}.md")
    return told(page, page.pieces[piece], read(FOLDER)[NAME][piece])
