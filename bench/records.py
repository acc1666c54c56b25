"""Writes and reads records.jsonl: one JSON object a line, only ever appended to.

{"kind": "setting", ...}    once: flags, cases, environment
{"kind": "skip", case, reason}
{"kind": "gate", case, passed, distance, reason}
{"kind": "launch", case, block, start, first, at_once}   of a case that stays started
{"kind": "sample", case, block, round, order, windows, warm_up, conditions, ...}   one turn
{"kind": "failure", case, block, reason}
{"kind": "stop", reason}    why no further block was run

In a block every case is started afresh, and takes one or more turns; a round is a turn of each, and
rounds are numbered through the run.
"""

import json
import os
from pathlib import Path

from bench import UserError

KINDS = {"setting", "skip", "gate", "launch", "sample", "failure", "stop"}
NAME = "records.jsonl"
# Other numbers for as much of a machine, which another job of Slurm's may be given.
VOLATILE = ("SLURM_CONF", "affinity", "cpuset.cpus.effective", "CUDA_VISIBLE_DEVICES", "topology")
STEAL, FOREIGN = 0.05, 0.10  # the most of either, as a share of the time of all cores


def append(folder: Path, kind: str, **fields) -> None:
    """Adds one record, whole and on the disk when this returns.

    Raises UserError where it can't, on a full disk for one.
    """
    assert kind in KINDS
    line = json.dumps({"kind": kind, **fields}, default=str) + "\n"
    path = folder / NAME
    try:
        with open(path, "a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; mend that, then go on with --resume") from None


def mend(folder: Path) -> None:
    """Cuts off a last line that a killed harness, or one on a full disk, began."""
    path = folder / NAME
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole, or leaves it as it was."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def lines(path: Path, kinds: set[str] | None = None) -> tuple[list[dict], list[int]]:
    """The objects of a file of JSON lines, and the numbers of the lines that are broken.

    Both are empty where there is no such file. kinds: a record of another kind is broken, too.
    """
    found, broken = [], []
    text = path.read_text(errors="replace") if path.is_file() else ""
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError:
            broken.append(number)
            continue
        if isinstance(record, dict) and (kinds is None or record.get("kind") in kinds):
            found.append(record)
        elif line.strip():
            broken.append(number)
    return found, broken


def read(folder: Path) -> tuple[list[dict], str | None]:
    """All whole records, and a warning where lines are lost.

    Raises UserError where there is nothing that could be shown.
    """
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder}: no {NAME} there, name a folder that `run` wrote")
    found, broken = lines(path, KINDS)
    if not found or found[0]["kind"] != "setting":
        raise UserError(f"{path}: not a record of `run`, or an empty one")
    if len(of(found, "setting")) > 1:
        raise UserError(f"{path}: two runs in one file, which never mix: keep a folder for each")
    warning = None
    if broken:
        numbers = ", ".join(map(str, broken[:5])) + ", ..." * (len(broken) > 5)
        text = f"line {numbers} is" if len(broken) == 1 else f"lines {numbers} are"
        warning = f"{path}: {text} broken and lost; all others were read"
    return found, warning


def measured(folder: Path) -> tuple[list[dict], str | None]:
    """`read`, of a run of which at least one case was timed.

    Raises UserError.
    """
    found, warning = read(folder)
    if not of(found, "sample"):
        raise UserError(f"{folder}: no round was measured yet, `run --resume {folder}` goes on")
    return found, warning


def of(records: list[dict], kind: str) -> list[dict]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]


def differences(old: dict, new: dict) -> list[str]:
    """What differs between two plans or hosts, each "key: old -> new"; VOLATILE do not count."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += [f"{key} {line}" for line in differences(a, b)]
        elif a != b and key not in VOLATILE:
            found.append(f"{key}: {a} -> {b}")
    return found


def spans(sample: dict) -> list[tuple[int, dict]]:
    """A sample's windows that begin after its warm-up, each with its number of steps.

    A window also ends where an epoch ends, so one may begin within the warm-up and end after it.
    """
    warm_up, windows = sample["warm_up"], sample["windows"]
    begins = [warm_up, *(w["step"] for w in windows)]
    pairs = zip(begins, windows, strict=False)
    return [(w["step"] - begin, w) for begin, w in pairs if warm_up <= begin < w["step"]]


def step_seconds(sample: dict) -> list[float]:
    """The seconds per step of each of a sample's counted windows."""
    return [window["seconds"] / steps for steps, window in spans(sample)]


def fault(sample: dict) -> str | None:
    """Why a sample's round is dropped, in words; None where it is not.

    By what else the machine did, never by the result; the table is made with and without it.
    """
    seen = sample["conditions"]
    for key, most in (("steal", STEAL), ("foreign", FOREIGN)):
        if seen.get(key, 0) > most:
            return f"{key} {seen[key]:.0%}"
    return "GPU throttled" if seen.get("gpu_throttled") else None


def dropped(samples: list[dict]) -> dict[int, str]:
    """The rounds to drop, each with its first reason; none where that would be more than half.

    A machine that is always so busy has no quiet rounds to prefer: pairing must do it alone.
    """
    faults: dict[int, str] = {}
    for sample in samples:
        if reason := fault(sample):
            faults.setdefault(sample["round"], f"{sample['case']}: {reason}")
    rounds = {sample["round"] for sample in samples}
    return faults if 2 * len(faults) <= len(rounds) else {}
