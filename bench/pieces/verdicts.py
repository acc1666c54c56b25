"""What a run with something taken back shows, in a sentence: refused, hangs, counts, off, prints.

It is compared with the exact numbers of bench/oracle.py, and where these are right with the output
of the whole script. Each verdict has facts, too, that do not depend on the machine.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# The last line of a traceback, or a script's own refusal, behind what a launcher puts before it.
ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?|\[\d+\]<stderr>: ?)*"
    r"(?:(?:\w+\.)*([A-Z]\w*(?:Error|Exception|Met|Exit)): ?(.*)|(\w+\.py): (.*))$"
)
THROWN = re.compile(r"terminate called .* an instance of '(?:\w+::)*(\w+)'\n +what\(\): *")
AGENTS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
CONSEQUENCE = re.compile("[Cc]onnection (closed|reset|refused)|Broken pipe")  # of another's end
TOLERANCE = {"train": 1e-6, "eval": 1e-5}  # relative: other batches are summed in another order
WRAPPERS = re.compile(r"(?:module\.|_orig_mod\.)*")  # what DDP and torch.compile put before names
LONGEST = 180  # characters of an error that are shown


@dataclass
class Ran:
    """What a run left."""

    code: int
    err: str  # what stood on stderr
    records: list[dict]
    folder: Path  # in which it ran
    weights: Path | None = None  # what it was to save
    stuck: dict[str, str] | None = None  # where it hangs: in which line each process is, by rank


def judge(
    ran: Ran,
    exact: Callable[[], Ran],
    whole: Callable[[], Ran],
    processes: int = 2,
    within: float = 0.0,
) -> dict:
    """The verdict: its kind, a text, and facts. exact and whole make the runs to compare with.

    within: losses no further from the exact ones than this count as equal; 0: but for rounding.
    """
    if ran.stuck is not None:
        return hangs(ran)
    if ran.code:
        return refused(ran)
    right = exact()
    found = counts(ran, right) or off(ran, right, within) or weights(ran, right, within)
    if found or (found := prints(ran, whole())):
        return found
    where = {1: "one CPU process", 2: "two CPU processes"}.get(processes, f"{processes} processes")
    steps = len(by_step(right, "train"))
    equal = f", where losses within {100 * within:g} % count as equal" if within else ""
    return verdict("same", f"nothing that {steps} steps on {where} could show{equal}.")


def verdict(kind: str, text: str, **facts) -> dict:
    """As outcomes.json has it."""
    return {"kind": kind, "text": text, "facts": facts}


def reached(ran: Ran) -> int:
    """The last step of which there is a record."""
    return max((r["step"] for r in ran.records if r["event"] == "train"), default=0)


def hangs(ran: Ran) -> dict:
    """Not done at its limit, and no longer computing: where the processes wait for each other."""
    places = [f"process {rank} waits in `{line}`" for rank, line in ran.stuck.items()]
    where = ", ".join(places) or "before main()"
    said = "Nothing was printed."
    if ran.records:
        last = ran.records[-1]
        step = f" of step {last['step']}" if "step" in last else ""
        said = f"The last line printed is `{last['event']}`{step}."
    text = f"it hangs: {where}. {said}"
    return verdict("hangs", text, lines=ran.stuck, step=reached(ran))


def refused(ran: Ran) -> dict:
    """An exit code other than 0: the error, as the user sees it."""
    name, text = error(ran.err)
    shown = f"{name}: {text}" if text else name
    step = reached(ran)
    when = f"after step {step}" if step else "before the first step"
    return verdict("refused", f"it ends {when}: `{shown}`", error=name, step=step)


def error(err: str) -> tuple[str, str]:
    """The name and the text of what went wrong first, by what stands on stderr."""
    err = THROWN.sub(r"\1: ", err)  # of C++, as a traceback says it
    found = [match for line in err.splitlines() if (match := ERROR.match(line.rstrip()))]
    pairs = [(m[1] or m[3], shortened(m[2] or m[4] or "")) for m in found if m[1] not in AGENTS]
    pairs.sort(key=lambda pair: bool(CONSEQUENCE.search(pair[1])))
    lines = [line for line in err.splitlines() if line.strip()]
    return pairs[0] if pairs else ("no error", shortened(lines[-1]) if lines else "")


def shortened(text: str) -> str:
    """Without folders and addresses, and not too long."""
    text = re.sub(r"\[(enforce fail at )?\S+:\d+\] ", "", text)  # a line of torch's C++
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text.replace("`", "'"))
    text = re.sub(r"\[?\d+\.\d+\.\d+\.\d+\]?:\d+|\[[\da-f:]+\]:\d+", "ADDRESS", text)
    return text if len(text) <= LONGEST else text[: LONGEST - 4].rsplit(" ", 1)[0] + " ..."


def by_step(ran: Ran, event: str) -> dict[int, list[dict]]:
    """The records of an event by their step (eval: epoch); several, where several wrote them."""
    found: dict[int, list[dict]] = {}
    for record in ran.records:
        if record["event"] == event:
            found.setdefault(record["epoch" if event == "eval" else "step"], []).append(record)
    return found


def counts(ran: Ran, exact: Ran) -> dict | None:
    """Other numbers of images than the exact ones: in a step, in an epoch, in testing."""
    parts, facts = [], {}
    mine, right = by_step(ran, "train"), by_step(exact, "train")
    if other := images(mine.get(1, [])) - images(right[1]):
        facts["step"] = [*sorted(other), *images(right[1])]
        *wrong, total = facts["step"]
        parts.append(f"a step counts {' and '.join(map(str, wrong))} images in place of {total}")
    first = [[r[0] for r in run.values() if r[0]["epoch"] == 1] for run in (mine, right)]
    if len(first[0]) != len(first[1]):
        facts["epoch"] = [len(records) for records in first]
        parts.append("an epoch has {} steps in place of {}".format(*facts["epoch"]))
        total = [sum(record["images"] for record in records) for records in first]
        if total[0] != total[1]:
            parts[-1] += " and counts {:,} images in place of {:,}".format(*total)
    mine, right = by_step(ran, "eval"), by_step(exact, "eval")
    if mine.keys() != right.keys():
        facts["evals"] = [len(mine), len(right)]
        parts.append("it evaluates {} times in place of {}".format(*facts["evals"]))
    elif other := images(mine[1]) - images(right[1]):
        facts["test"] = [*sorted(other), *images(right[1])]
        *wrong, total = facts["test"]
        parts.append(f"the {total} test images are counted as {' and as '.join(map(str, wrong))}")
    return verdict("counts", "; ".join(parts) + ".", **facts) if parts else None


def images(records: list[dict]) -> set[int]:
    """The numbers of images in some records."""
    return {record["images"] for record in records}


def off(ran: Ran, exact: Ran, within: float = 0.0) -> dict | None:
    """Other losses: from which step on, or in which evaluation."""
    first = {}
    for event, least in TOLERANCE.items():
        tolerance = max(least, within)
        mine = by_step(ran, event)
        for number, (right, *_) in by_step(exact, event).items():
            other = [r for r in mine[number] if apart(r["loss"], right["loss"]) > tolerance]
            if other:
                first[event] = number, f"{shown(other[0])} in place of {shown(right)}"
                break
    if "train" in first:
        number, losses = first["train"]
        other = f"off by more than {100 * within:g} %" if within else "another"
        return verdict("off", f"from step {number} on the loss is {other}: {losses}.", step=number)
    if "eval" in first:
        number, losses = first["eval"]
        same = f"within {100 * within:g} %" if within else "the same"
        text = f"training is {same}, but the test loss after epoch {number} is {losses}."
        return verdict("off", text, epoch=number)
    return None


def apart(one: float | None, other: float | None) -> float:
    """Their relative distance; None stands for a number that is not finite."""
    if one is None or other is None:
        return 0.0 if one == other else float("inf")
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def shown(record: dict) -> str:
    """A record's loss."""
    return "nan" if record["loss"] is None else f"{record['loss']:.4f}"


def weights(ran: Ran, exact: Ran, within: float = 0.0) -> dict | None:
    """The same losses, but no saved weights or others. within: so far off as a whole."""
    if not ran.weights:  # they were not asked for
        return None
    if not ran.weights.exists():
        return verdict("off", "the losses are the same, but no weights are saved.", weights="none")
    import torch

    mine, right = (torch.load(path) for path in (ran.weights, exact.weights))
    mine = {name.removeprefix(prefix(ran)): value.double() for name, value in mine.items()}
    right = {name: value.double() for name, value in right.items()}
    close = mine.keys() == right.keys()
    if close and within:
        away = sum((mine[name] - value).square().sum() for name, value in right.items())
        close = away <= within**2 * sum(value.square().sum() for value in right.values())
    elif close:
        close = all(torch.allclose(mine[name], right[name], 1e-4, 1e-5) for name in right)
    text = "the losses are the same, but the saved weights are not."
    return None if close else verdict("off", text, weights="other")


def prints(ran: Ran, whole: Ran) -> dict | None:
    """Equal numbers, but another output than the whole script's."""
    parts, facts = [], {}
    mine, theirs = (Counter(record["event"] for record in run.records) for run in (ran, whole))
    if more := [event for event in mine if mine[event] > theirs[event]]:
        facts["times"] = {event: [mine[event], theirs[event]] for event in more}
        said = (f"{mine[event]} `{event}` lines in place of {theirs[event]}" for event in more)
        parts.append(f"there are {', '.join(said)}")
    if lost := sorted(fields(whole) - fields(ran)):
        facts["lost"] = lost
        events = dict.fromkeys(name.split()[0] for name in lost)
        for event in events:
            names = listed([name.split()[1] for name in lost if name.split()[0] == event])
            parts.append(f"the `{event}` line lacks {names}")
    if ran.weights and prefix(ran) != prefix(whole):
        facts["prefix"] = prefix(ran)
        parts.append(f"the names in the saved file begin with `{prefix(ran)}`")
    mine, theirs = ({path.name for path in run.folder.iterdir()} for run in (ran, whole))
    if left := sorted(mine - theirs):
        facts["files"] = left
        parts.append(f"it leaves {listed(left)} behind")
    known = {normal(line) for line in whole.err.splitlines()}
    said = [line for line in ran.err.splitlines() if line.strip() and normal(line) not in known]
    if said:
        facts["stderr"] = True
        parts.append(f"stderr says: `{shortened(said[0])}`")
    return verdict("prints", "; ".join(parts) + ".", **facts) if parts else None


def fields(ran: Ran) -> set[str]:
    """What its records name, each event by itself."""
    return {f"{record['event']} {name}" for record in ran.records for name in record}


def prefix(ran: Ran) -> str:
    """What the names of all the saved weights begin with."""
    import torch

    names = list(torch.load(ran.weights))
    first = WRAPPERS.match(names[0])[0]
    return first if all(name.startswith(first) for name in names) else ""


def listed(names: list[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def normal(line: str) -> str:
    """A line without the numbers that differ from run to run."""
    return re.sub(r"\d+", "#", line)
