"""python -m mistakes COMMAND: what goes wrong without each change of a diff.

list [PAGE] [--silent]   the mistakes that docs/diffs/ tells of, and what they did
run PAGE PIECE           makes one, runs the script with and without it, and compares
quiz [PAGE]              a script with a mistake, for you to find and repair
measure                  for editors: measures all of them, and writes docs/diffs/
audited                  for editors: runs all of them under audit.py, and records what it finds
"""

import sys

from bench import UserError
from mistakes import audited, measure, quiz, run

COMMANDS = {"list": run.show, "run": run.run, "quiz": quiz.main}
COMMANDS |= {"measure": measure.main, "audited": audited.main}


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code: 2 for a user's mistake, told in one line."""
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
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
