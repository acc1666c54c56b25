"""The harness: times every script of the ladder on this machine, and shows what it measured."""

from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent  # the project's folder


class UserError(Exception):
    """What a user must mend: the text is one line that says what and how; exit code 2."""


def refuse(message: str) -> NoReturn:
    """Raises UserError: for a parser's `error`, which is to be one line."""
    raise UserError(message)
