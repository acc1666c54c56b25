"""The diffs between the scripts, as the tests and the README hold them. To write them anew:

python tests/update_golden.py
"""

import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
LIMITS = {  # pair of scripts: the most lines that may be added and removed
    ("snsc", "snmc_dp"): (4, 4),
    ("snsc", "mnmc_ddp_launch"): (20, 12),
    ("mnmc_ddp_launch", "mnmc_ddp_mp"): (20, 10),
    ("mnmc_ddp_launch", "mnmc_ddp_slurm"): (16, 8),
    ("mnmc_ddp_launch", "mnmc_apex"): (20, 10),
    ("snsc", "mnmc_horovod"): (24, 12),
}


def diff(before: str, after: str) -> str:
    """What `diff -u before.py after.py` prints, without the times."""
    names = [f"{before}.py", f"{after}.py"]
    texts = [(ROOT / name).read_text().splitlines(keepends=True) for name in names]
    return "".join(difflib.unified_diff(*texts, *names))


def changed(text: str) -> tuple[int, int]:
    """How many lines a diff adds and removes."""
    lines = text.splitlines()[2:]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def golden(before: str, after: str) -> Path:
    return GOLDEN / f"{before}--{after}.diff"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for pair in LIMITS:
        golden(*pair).write_text(diff(*pair))
        print(golden(*pair).relative_to(ROOT), "+{} -{}".format(*changed(diff(*pair))))
