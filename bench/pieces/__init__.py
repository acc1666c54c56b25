"""The pages of docs/ladder/: a script's diff from its parent in pieces, each with its absence."""

from bench.pieces.command import main

__all__ = ["main"]
