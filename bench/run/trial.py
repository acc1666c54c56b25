"""A few steps of a case as it will be timed, to their end: how much of a GPU's memory they take.

The gate's kernels are others (deterministic, without TF32, some in double precision), with other
memory and another speed. A case that stays started never ends, and so never reports its peak.
"""

import statistics

from bench import process
from bench.cases import Case
from bench.host import Host

STEPS, FIRST = 8, 3  # of a trial; and those of them that load, compile and try kernels
LIMIT = 600.0  # seconds: to compile may take a minute


def trial(case: Case, flags: list, host: Host) -> dict:
    """The fields of a trial's record: the case's end, and step_seconds, the median of its steps.

    Raises Failed.
    """
    command = case.command(*flags, "--max-steps", STEPS, "--log-every", 1, host=host)
    lines, _ = process.launch(command, process.environment(**case.own_variables(host)), LIMIT)
    steps = [line["seconds"] for line in lines if line["event"] == "train"][FIRST:]
    found = {"step_seconds": statistics.median(steps)} if steps else {}  # an epoch may be short
    return {"end": lines[-1], **found}
