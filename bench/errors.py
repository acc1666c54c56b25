"""Finds the line of a program's output that says why it failed."""

import re
from itertools import pairwise

COLOUR = re.compile(r"\x1b\[[\d;]*m")
THROWN = re.compile(r"terminate called .* an instance of '(?:\w+::)*(\w+)'\n +what\(\): *")
# What launchers put before a line of a process: torch's, Horovod's and srun's.
PREFIX = re.compile(r"^(\[rank\d+\]: ?|\[[\d,]+\]<std(err|out)>: ?|\d+: )+")
# An exception's own line; without those of launchers, which only say that a process failed.
RAISED = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?!Child|Process(?:Raised|Exited))"
    r"(\w*(?:Error|Exception|Interrupt|Exit|Failed|Met))(?::(.*))?"
)
CHAINED = ("During handling of the above", "The above exception was")  # the next one says more
# Of an exception that follows from another process's end.
CONSEQUENCE = re.compile("[Cc]onnection (closed|reset|refused)|Broken pipe")
OURS = re.compile(r"([\w/]+\.(py|sh)|--?\w[^:]*): .+")  # a script's own line, of a file or a flag
SIGNAL = re.compile(r"\s*traceback : (Signal \d+ \(\w+\) received.*)")  # in torchrun's report
TOLD = re.compile(r"(\[?E\d{4} .*|(.*\W)?(fatal|error|killed|fault|core dumped)\b.*)", re.I)
NOISE = re.compile(
    r"\s.*|Traceback .*|\[?W\d{4} .*|.*warning\b.*|.*\bChildFailedError\b.*|[-=~^_* ]*"
    r"|\[?E\d{4} .*failed \(exitcode.*|srun: error: \S+: tasks? .*|slurmstepd: .*",
    re.I,
)


def reason(text: str) -> str:
    """The line that says why a program failed, from all that it printed; of several processes the
    first one's.

    An exception's own line (of a chain of them the last), else a script's line for its user, else
    one that tells of an error, else the last line that is no warning.
    """
    text = THROWN.sub(r"\1: ", COLOUR.sub("", text))  # C++ reports an error in two lines
    lines = [PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    raised = [k for k, line in enumerate(lines) if RAISED.fullmatch(line)]
    found = []
    for k, following in pairwise([*raised, None]):
        if not any(line.startswith(CHAINED) for line in lines[k:following]):
            found.append(lines[k])
    found.sort(key=lambda line: bool(CONSEQUENCE.search(line)))
    found += [line for line in lines if OURS.fullmatch(line)]
    found += [said[1] for line in lines if (said := SIGNAL.fullmatch(line))]
    quiet = [line for line in lines if line and not NOISE.fullmatch(line)]
    found += [line for line in quiet if TOLD.fullmatch(line)]
    rest = [line for line in lines if line.strip()]
    return [*found, *quiet[::-1], *rest[::-1], ""][0].strip()


def divided(line: str) -> tuple[str, str]:
    """The name and the text of an exception's line; no name for any other line."""
    raised = RAISED.fullmatch(line)
    return (raised[1], (raised[2] or "").strip()) if raised else ("", line)
