"""What a run's numbers say, in words: one sentence on top, and what a reader must know beside it.

All of it is made from the rows of summary.by_case and from the records; nothing is claimed here
that a row does not claim.
"""

import shlex
from datetime import UTC, datetime

import numpy as np

from bench import records, stats
from bench.cases import AGAIN, DDP, PLAIN
from bench.ladder import TIMED
from bench.show.summary import compared, speeds

WIDE = 0.1  # the control's interval, either way: from here on the table begins with a warning
WAITING = 0.1  # a part of the time: from here on the loader decides the speed, too
NAMED = 3  # this many cases are named; the others are counted
CLAIMS = ("faster", "slower", stats.UNCLEAR, stats.NOTHING)
# The fields of a plan that are flags of `run`, by name.
FLAGS = ("dataset", "data", "arch", "image_size", "batch_size", "workers", "seed", "scaling")
FLAGS += ("price",)
CPU = "A CPU does not predict the order on GPUs."
GPU = (
    "Waiting for data is the time that rank 0 waits for its loader. Its GPU computes what is "
    "queued meanwhile, so it waits at most that long."
)


def listed(texts: list[str], most: int = NAMED) -> str:
    """Texts as a list in words: "a, b and 3 more"."""
    if len(texts) > most + 1:
        texts = [*texts[:most], f"{len(texts) - most} more"]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else ""


def counted(number: int, word: str) -> str:
    """A number with its noun: "1 case", "2 cases"."""
    return f"{number} {word}{'s' * (number != 1)}"


def timed(rows: list[dict]) -> list[dict]:
    """The rows that have a speed at the whole global batch, snsc.py among them."""
    return [row for row in rows if row["status"] == "ok" and row["share"] == 1]


def control(rows: list[dict]) -> dict | None:
    """The row of the control, where it has a ratio."""
    return next((row for row in rows if row["case"] == AGAIN and row.get("ratio")), None)


def span(middle: float, low: float | None, high: float | None) -> str:
    """A ratio with its interval: "0.842 [0.813, 0.893]"; alone, where it has none."""
    return f"{middle:.3f}" if low is None else f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def ratio(row: dict, key: str = "ratio") -> str:
    """A row's ratio with its interval."""
    return span(row[key], row.get(f"{key}_low"), row.get(f"{key}_high"))


def against(rows: list[dict], key: str, other: str) -> str:
    """What the rows claim against another case, as a sentence; "" where they say nothing of it.

    key: of the ratio, "ratio" or "ddp_ratio"; the claims stand under "claim" and "ddp_claim".
    """
    claim = key.replace("ratio", "claim")
    found = [row for row in timed(rows) if row.get(key) and row.get(claim)]
    if not found:
        return ""
    if all(row[claim] == stats.NOTHING for row in found):
        found.sort(key=lambda row: row[key])
        ends = [f"{row[key]:.2f} ({row['case']})" for row in (found[0], found[-1])]
        reach = f"from {ends[0]} to {ends[1]}" if len(found) > 1 else ends[0]
        return f"Ratios to {other}: {reach}."
    found.sort(key=lambda row: -abs(np.log(row[key])))
    parts, than = [], f" than {other}"
    for word in ("slower", "faster"):
        told = [f"{r['case']} by {abs(r[key] - 1):.0%}" for r in found if r[claim] == word]
        if told:
            parts.append(f"{word}{than}: {listed(told)}")
            than = ""
    where = f" from {other}" if than else ""
    for word, words in ((stats.UNCLEAR, stats.UNCLEAR + where), (stats.NOTHING, stats.NOTHING)):
        if number := sum(row[claim] == word for row in found):
            parts.append(f"{words}: {counted(number, 'case')}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def tally(rows: list[dict], key: str, other: str) -> str:
    """How many rows claim what against another case, as a sentence; "" where none has a claim."""
    made = [row[key] for row in timed(rows) if row.get(key)]
    parts = [f"{made.count(claim)} {claim}" for claim in CLAIMS if claim in made]
    return f"Against {other}: {', '.join(parts)}." if parts else ""


def unclaimed(rows: list[dict]) -> str:
    """Why no row claims anything, as a sentence; "" where one does, or none could."""
    made = [row[key] for row in timed(rows) for key in ("claim", "ddp_claim") if row.get(key)]
    if not made or set(made) != {stats.NOTHING}:
        return ""
    blocks = max(row.get("blocks") or 0 for row in rows)
    if blocks < stats.FEWEST:
        why = f"{counted(blocks, 'block')}, and a claim needs {stats.FEWEST}"
    elif control(rows) is None:
        why = "the control is missing"
    else:
        why = f"the repeat of {PLAIN} deviates by more than {stats.LEAST:.0%}, a noisy machine"
    return f"Nothing is claimed: {why}."


def speed_ups(rows: list[dict]) -> str:
    """What several devices bring, from the least to the most, as a sentence; "" for one device."""
    most = max((row["devices"] or 1 for row in timed(rows)), default=1)
    found = [row for row in timed(rows) if row["devices"] == most > 1 and row.get("ratio")]
    if not found:
        return ""
    found.sort(key=lambda row: row["ratio"])
    ends = [f"{row['ratio']:.2f} times {PLAIN} ({row['case']})" for row in (found[0], found[-1])]
    return f"On {most} devices: {' to '.join(ends if found[1:] else ends[:1])}."


def coarse(rows: list[dict]) -> str:
    """A warning where the control's interval is wide, as a sentence; "" where it is not."""
    row = control(rows)
    if row is None or row.get("ratio_low") is None:
        return ""
    reach = max(row["ratio_high"] - 1, 1 / row["ratio_low"] - 1)
    return f"This run can tell differences of {reach:.0%} or more." if reach > WIDE else ""


def steady(rows: list[dict]) -> str:
    """What the control shows, as a sentence; "" where there is none."""
    row = control(rows)
    if row is None:
        return ""
    text = f"The control, a repeat of {PLAIN}, is at {ratio(row)}"
    if row.get("ratio_low") is None:
        return f"{text}."
    if row["ratio_low"] <= 1 <= row["ratio_high"]:
        return f"{text}, which includes 1."
    return f"{text}, which excludes 1: no difference in code explains that."


def wrong(rows: list[dict]) -> str:
    """Which cases failed and so have no speed, as a sentence; "" if none did."""
    parts = []
    for word, verb in (("failed the gate", "did not pass the gate"), ("failed:", "failed")):
        names = [row["case"] for row in rows if row["status"].startswith(word)]
        parts += [f"{listed(names)} {verb}"] if names else []
    return f"Not measured: {'; '.join(parts)}." if parts else ""


def sentence(rows: list[dict]) -> str:
    """The result in words, from the rows of summary.by_case: claims first, then the control."""
    parts = [coarse(rows), unclaimed(rows), speed_ups(rows), against(rows, "ratio", PLAIN)]
    parts.append(against(rows, "ddp_ratio", f"{DDP} with as many processes"))
    parts += [steady(rows), wrong(rows)]
    return " ".join(filter(None, parts)) or (
        f"Only {listed([row['case'] for row in timed(rows)]) or 'no case'} was measured."
    )


def without(rows: list[dict]) -> list[str]:
    """A line for each case without a speed: its name, and why."""
    return [f"{row['case']}: {row['status']}" for row in rows if row["status"] != "ok"]


def method(known: list[dict], rows: list[dict]) -> list[str]:
    """How it was measured, how much starts and turns differ, and what such a run can find."""
    kinds = [r["kind"] for r in known if r["kind"] in ("stop", "sample")]
    stops = records.of(known, "stop")
    why = stops[-1]["reason"] if kinds[-1:] == ["stop"] else "the run was cut short"
    blocks = max((row.get("blocks") or 0 for row in rows), default=0)
    how = "Intervals come from the blocks, and are wide enough for all claims together."
    if blocks < stats.FEWEST:
        how = f"With fewer than {stats.FEWEST} blocks it has no interval."
    lines = [
        f"{counted(blocks, 'block')}: {why}. In each block every case starts anew, and the cases "
        f"take turns in random order. A ratio is paired within each turn. {how}"
    ]
    spread = {
        text: [row[key] for row in rows if row.get(key) is not None]
        for key, text in (("between_starts", "start to start"), ("between_turns", "turn to turn"))
    }
    parts = [f"{np.median(found):.1%} from {text}" for text, found in spread.items() if found]
    if parts:
        lines.append(f"A case's ratio differs by {' and '.join(parts)} (medians over the cases).")
    ratios = compared(known, speeds(known))
    least = [x for logs in ratios.values() if (x := stats.smallest(logs, len(ratios)))]
    if least:
        lines.append(
            f"The chance of any false claim is at most {1 - stats.LEVEL:.0%}. The chance to find a "
            f"case that is {np.median(least):.0%} slower is {stats.FOUND:.0%} (median over "
            f"{counted(len(least), 'comparison')}; {min(least):.0%} to {max(least):.0%})."
        )
    return lines


def hints(known: list[dict], rows: list[dict]) -> list[str]:
    """What to keep in mind about the numbers of this run."""
    lines = []
    waiting = max(timed(rows), key=lambda row: row.get("data_share") or 0, default={})
    if (waiting.get("data_share") or 0) > WAITING:
        lines.append(
            f"{waiting['case']} waits for data for {waiting['data_share']:.0%} of the time, so the "
            "table measures the loader, too. Raise --workers."
        )
    if max((row.get("mfu") or 1 for row in rows), default=1) < 0.1:
        lines.append(
            "MFU below 10%: most of a step is spent launching kernels, so faster arithmetic hardly "
            "shows. Raise --batch-size or --image-size, or use --dataset imagenet."
        )
    return [*lines, GPU if known[0]["environment"]["gpus"] else CPU]


def when(known: list[dict]) -> str:
    """When the run began, in UTC, and how long it measured; "" where no record says it."""
    begins = [r["begin"] for r in records.of(known, "sample") if r.get("begin")]
    starts = [
        r.get("start", {}).get("time")
        for kind in ("gate", "launch")
        for r in known
        if r["kind"] == kind
    ]
    times = [*begins, *filter(None, starts)]
    if not times:
        return ""
    ends = [
        r["begin"] + r.get("conditions", {}).get("wall", 0)
        for r in records.of(known, "sample")
        if r.get("begin")
    ]
    minutes = (max([*ends, *times]) - min(times)) / 60
    day = datetime.fromtimestamp(min(times), UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{day}, {minutes:.0f} minutes"


def command(known: list[dict]) -> str:
    """The command of the run; of a run that does not record it, one of the same plan."""
    setting = known[0]
    if setting.get("command"):
        return setting["command"]
    words, plan = ["python", "-m", "bench", "run"], setting["plan"]
    words += ["--quick"] if plan.get("quick") else []
    names = {case.get("technique") for case in setting["cases"]}
    held = dict.fromkeys(how.group for name, (_, how) in TIMED.items() if name in names)
    words += ["--techniques", ",".join(held)] if held else []
    for name in FLAGS:
        if plan.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(plan[name])]
    worlds = sorted({case["world"] for case in setting["cases"]})
    return shlex.join([*words, "--world", ",".join(map(str, worlds))])
