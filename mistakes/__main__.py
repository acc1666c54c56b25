"""python -m mistakes COMMAND: what goes wrong without each change of a diff.

measure takes every change away, runs what is left, and writes the pages of docs/diffs/.
"""

import sys

from bench import UserError
from mistakes import measure

COMMANDS = {"measure": measure.main}


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code: 2 for a user's mistake, told in one line."""
    if not argv or argv[0] not in COMMANDS:
        print(f"mistakes: the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[argv[0]](argv[1:])
    except UserError as error:
        print(f"mistakes: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
