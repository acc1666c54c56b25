"""What a run with something taken back shows: its kind, and a sentence.

crash           it ends with an error
hang            its ranks wait for each other
silent          it ends as if all were well, but numbers, counts or files are wrong
NaN             it ends as if all were well, but its log shows losses that are not finite
no effect here  its numbers are those of bench/oracle.py; a sentence says if it prints more lines
                than the whole script

Each verdict has facts, too, which do not depend on the machine.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from bench import errors

TOLERANCE = {"train": 1e-6, "eval": 1e-5}  # relative: other batches are summed in another order
WRAPPERS = re.compile(r"(?:module\.|_orig_mod\.)*")  # what DDP and torch.compile put before names
LONGEST = 180  # characters of an error that are shown


@dataclass
class Ran:
    """What a run left."""

    code: int
    err: str  # its stderr
    records: list[dict]
    folder: Path  # in which it ran
    weights: Path | None = None  # what it was to save
    stuck: dict[str, str] | None = None  # where it hangs: the line that each rank is in


def judge(
    ran: Ran, exact: Callable[[], Ran], whole: Callable[[], Ran], within: float = 0.0
) -> dict:
    """The verdict: its kind, a text, and facts. exact and whole make the runs to compare with.

    within: relative distance at which losses count as equal; 0: that of rounding.
    """
    if ran.stuck is not None:
        return hangs(ran)
    if ran.code:
        return refused(ran)
    right = exact()
    found = counts(ran, right) or off(ran, right, within) or weights(ran, right, within)
    if found := found or repeated(ran, whole()):
        return found
    text = f"no loss is wrong by more than {100 * within:g}%." if within else ""
    return verdict("no effect here", text)


def shown(kind: str) -> str:
    """A kind as pages show it."""
    return f"**{kind if kind == 'NaN' else kind.upper()}**"


def verdict(kind: str, text: str, **facts) -> dict:
    """As outcomes.json has it."""
    return {"kind": kind, "text": text, "facts": facts}


def reached(ran: Ran) -> int:
    """The last step of which there is a record."""
    return max((r["step"] for r in ran.records if r["event"] == "train"), default=0)


def hangs(ran: Ran) -> dict:
    """Not done at its limit, and no longer computing: where the ranks wait for each other."""
    places = [f"rank {rank} waits in `{line}`" for rank, line in ran.stuck.items()]
    where = ", ".join(places) or "before main()"
    said = "Nothing was printed."
    if ran.records:
        last = ran.records[-1]
        step = f" of step {last['step']}" if "step" in last else ""
        said = f"The last line printed is `{last['event']}`{step}."
    return verdict("hang", f"{where}. {said}", lines=ran.stuck, step=reached(ran))


def refused(ran: Ran) -> dict:
    """An exit code other than 0: the error, as the user sees it."""
    name, text = error(ran.err)
    step = reached(ran)
    when = f"after step {step}" if step else "before step 1 is logged"
    shown = ": ".join(word for word in (name, text) if word) or f"exit code {ran.code}"
    return verdict("crash", f"{when}, `{shown}`", error=name, step=step)


def error(err: str) -> tuple[str, str]:
    """The name and the text of the first error on stderr; no name for a script's own message."""
    name, text = errors.divided(errors.reason(err))
    return name, shortened(text)


def shortened(text: str) -> str:
    """An error's text without folders and addresses, and not too long."""
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
    """Wrong numbers of images: in a step, in an epoch, in the evaluation."""
    parts, facts = [], {}
    mine, right = by_step(ran, "train"), by_step(exact, "train")
    if other := images(mine.get(1, [])) - images(right[1]):
        facts["step"] = [*sorted(other), *images(right[1])]
        *wrong, total = facts["step"]
        parts.append(f"a step counts {' and '.join(map(str, wrong))} images instead of {total}")
    for epoch in sorted({r[0]["epoch"] for r in [*mine.values(), *right.values()]}):
        both = [[r[0] for r in run.values() if r[0]["epoch"] == epoch] for run in (mine, right)]
        if len(both[0]) == len(both[1]):
            continue
        facts["epoch"] = [len(records) for records in both]
        which = "an epoch" if epoch == 1 else f"epoch {epoch}"
        parts.append("{} has {} steps instead of {}".format(which, *facts["epoch"]))
        total = [sum(record["images"] for record in records) for records in both]
        if total[0] != total[1]:
            parts[-1] += " and counts {:,} images instead of {:,}".format(*total)
        break
    else:
        if missing := right.keys() - mine.keys():
            facts["missing"] = min(missing)
            parts.append(f"step {min(missing)} is not logged")
    mine, right = by_step(ran, "eval"), by_step(exact, "eval")
    if mine.keys() != right.keys():
        facts["evals"] = [len(mine), len(right)]
        parts.append("it evaluates {} times instead of {}".format(*facts["evals"]))
    elif other := images(chain(*mine.values())) - images(chain(*right.values())):
        facts["test"] = [*sorted(other), *images(right[1])]
        *wrong, total = facts["test"]
        parts.append(f"the {total} test images are counted as {' and as '.join(map(str, wrong))}")
    return verdict("silent", "; ".join(parts) + ".", **facts) if parts else None


def images(records: Iterable[dict]) -> set[int]:
    """The different numbers of images in some records."""
    return {record["images"] for record in records}


def off(ran: Ran, exact: Ran, within: float = 0.0) -> dict | None:
    """Wrong losses, or some that are not finite: from which step on, or in which evaluation."""
    first = {}
    for event, least in TOLERANCE.items():
        tolerance = max(least, within)
        mine = by_step(ran, event)
        for number, (right, *_) in by_step(exact, event).items():
            other = [r for r in mine[number] if apart(r["loss"], right["loss"]) > tolerance]
            if other:
                other.sort(key=lambda r: r["loss"] is not None)
                kind = "NaN" if other[0]["loss"] is None else "silent"
                first[event] = kind, number, compared(other[0], right)
                break
    if "train" in first:
        kind, number, losses = first["train"]
        wrong = "" if kind == "NaN" else "wrong: "
        return verdict(kind, f"from step {number} the loss is {wrong}{losses}.", step=number)
    if "eval" in first:
        kind, number, losses = first["eval"]
        same = f"right within {100 * within:g}%" if within else "right"
        text = f"training is {same}, but the test loss after epoch {number} is {losses}."
        return verdict(kind, text, epoch=number)
    return None


def apart(one: float | None, other: float | None) -> float:
    """Their relative distance; None stands for a number that is not finite."""
    if one is None or other is None:
        return 0.0 if one == other else float("inf")
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def compared(wrong: dict, right: dict) -> str:
    """The losses of two records, with enough digits to see that they differ."""
    for digits in (4, 6, 9):
        first, second = (
            "nan" if record["loss"] is None else f"{record['loss']:.{digits}f}"
            for record in (wrong, right)
        )
        if first != second:
            break
    return f"{first} instead of {second}"


def weights(ran: Ran, exact: Ran, within: float = 0.0) -> dict | None:
    """Right losses, but no saved weights, wrong ones, or ones with other names.

    within: relative distance of all weights together that counts as equal.
    """
    if not ran.weights:  # they were not asked for
        return None
    if not ran.weights.exists():
        text = "the losses are right, but no file is saved."
        return verdict("silent", text, weights="none")
    mine, right = saved(ran), saved(exact)
    first = WRAPPERS.match(next(iter(mine), ""))[0]
    bare = {name.removeprefix(first): value for name, value in mine.items()}
    shapes = [{name: each.shape for name, each in side.items()} for side in (bare, right)]
    close = shapes[0] == shapes[1]
    if close and within:
        away = sum((bare[name] - value).square().sum() for name, value in right.items())
        close = away <= within**2 * sum(value.square().sum() for value in right.values())
    elif close:
        close = all(bare[name].allclose(right[name], 1e-4, 1e-5) for name in right)
    if not close:
        text = "the losses are right, but the saved weights are not."
        return verdict("silent", text, weights="wrong")
    if first:
        text = f"the names in the saved file begin with `{first}`."
        return verdict("silent", text, prefix=first)
    return None


def saved(ran: Ran) -> dict:
    """The weights that a run has saved, by itself or as a part of a checkpoint."""
    import torch

    state = torch.load(ran.weights)
    return {name: value.double() for name, value in state.get("model", state).items()}


def repeated(ran: Ran, whole: Ran) -> dict | None:
    """Right numbers, but more lines than the whole script prints."""
    mine, theirs = (Counter(record["event"] for record in run.records) for run in (ran, whole))
    more = {event: [mine[event], theirs[event]] for event in mine if mine[event] > theirs[event]}
    if not more:
        return None
    said = (f"{one} `{event}` lines instead of {other}" for event, (one, other) in more.items())
    return verdict("no effect here", f"there are {', '.join(said)}.", times=more)
