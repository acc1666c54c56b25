"""The diffs between the scripts, as the tests and the README hold them. To write them anew:

python tests/update_golden.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.diffs import PAIRS, counts, diff

GOLDEN = ROOT / "tests" / "golden"


def golden(old: str, new: str) -> Path:
    """The file of a pair of scripts."""
    return GOLDEN / f"{Path(old).stem}--{Path(new).stem}.diff"


if __name__ == "__main__":
    for file in GOLDEN.glob("*.diff"):
        file.unlink()
    for old, new, *_ in PAIRS:
        golden(old, new).write_text(diff(old, new))
        print(golden(old, new).relative_to(ROOT), "+{} -{}".format(*counts(diff(old, new))))
