"""Says what a run's numbers mean: a sentence on top, and what a reader must know beside it.

sentence.jinja and notes.jinja have the text; here is what they are told. All of it comes from the
rows of summary.by_case and from the records; nothing is claimed that a row does not claim.
"""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench import records, stats
from bench.cases import AGAIN, DDP, PLAIN
from bench.show.summary import Run, compared, speeds, timed

NAMED = 3  # this many cases are named; the others are counted
CPU = "A CPU does not predict the order of the scripts on GPUs."
GPU = (
    "Waiting for data is the time that rank 0 waits for its loader. Its GPU computes what is "
    "queued meanwhile, so it waits at most that long."
)


def listed(texts: list[str]) -> str:
    """Texts as a list in words: "a, b and 3 more"."""
    if len(texts) > NAMED + 1:
        texts = [*texts[:NAMED], f"{len(texts) - NAMED} more"]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else ""


def counted(number: int, word: str) -> str:
    """A number with its noun: "1 case", "2 cases"."""
    return f"{number} {word}{'s' * (number != 1)}"


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
        return f"Ratios to {other}: {f'from {ends[0]} to {ends[1]}' if found[1:] else ends[0]}."
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


TEXTS = Environment(
    loader=FileSystemLoader(Path(__file__).resolve().parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEXTS.filters |= {"counted": counted, "listed": listed, "percent": "{:.0%}".format}
TEXTS.filters["ratio"] = ratio
TEXTS.filters["median"] = lambda values: float(np.median(values))
TEXTS.globals |= {"PLAIN": PLAIN, "DDP": DDP, "against": against}
TEXTS.globals |= {"CPU": CPU, "GPU": GPU, "LEAST": stats.LEAST, "FEWEST": stats.FEWEST}
TEXTS.globals |= {"LEVEL": stats.LEVEL, "FOUND": stats.FOUND}


def most_blocks(rows: list[dict]) -> int:
    """The blocks of the case that has most of them."""
    return max((row["blocks"] or 0 for row in rows), default=0)


def sentence(rows: list[dict]) -> str:
    """The result in words, from the rows of summary.by_case."""
    again, ready = control(rows), timed(rows)
    made = {row[key] for row in ready for key in ("claim", "ddp_claim")}
    wide = again and again["ratio_low"] is not None
    most = max((row["devices"] or 1 for row in ready), default=1)
    several = [row for row in ready if row["devices"] == most > 1 and row["ratio"]]
    failed = {
        how: [row["case"] for row in rows if row["status"].startswith(word)]
        for word, how in (("failed the gate", "did not pass the gate"), ("failed:", "failed"))
    }
    text = TEXTS.get_template("sentence.jinja").render(
        rows=rows,
        control=again,
        reach=max(again["ratio_high"] - 1, 1 - again["ratio_low"]) if wide else 0,
        nothing_claimed=made - {None} == {stats.NOTHING},
        blocks=most_blocks(rows),
        several=sorted(several, key=lambda row: row["ratio"]),
        failed={how: names for how, names in failed.items() if names},
    )
    if text.strip():
        return " ".join(text.split())
    return f"Only {listed([row['case'] for row in ready]) or 'no case'} was measured."


def without_speed(rows: list[dict]) -> list[str]:
    """Why cases have no speed: a line for each reason, after the names of its cases."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            found.setdefault(row["status"], []).append(row["case"])
    return [f"{', '.join(cases)}: {status}" for status, cases in found.items()]


def notes(run: Run) -> list[str]:
    """What a reader must know beside the numbers: the cases without a speed, then the method."""
    rows, ends = run.rows, [r for r in run.known if r["kind"] in ("stop", "sample")][-1:]
    samples, ratios = records.of(run.every, "sample"), compared(run.known, speeds(run.known))
    spreads = {
        text: [row[key] for row in rows if row[key] is not None]
        for key, text in (("between_starts", "between starts"), ("between_turns", "between turns"))
    }
    text = TEXTS.get_template("notes.jinja").render(
        missing=without_speed(rows),
        blocks=most_blocks(rows),
        stopped=ends[0].get("reason", "the run was cut short") if ends else "it has not begun",
        spreads={text: found for text, found in spreads.items() if found},
        least=[x for logs in ratios.values() if (x := stats.smallest(logs, len(ratios)))],
        dropped=[f"round {k}, {why}" for k, why in records.dropped(samples).items()],
        rounds=len({sample["round"] for sample in samples}),
        waiting=max(timed(rows), key=lambda row: row["data_share"], default={"data_share": 0}),
        apex=next((row for row in timed(rows) if row["script"] == "mnmc_apex.py"), None),
        precision=rows[0]["precision"],
        mfu=[row["mfu"] for row in rows if row["mfu"]],
        gpus=run.gpus,
        warning=run.warning,
    )
    return [" ".join(note.split()) for note in f"\n{text}".split("\n- ")[1:]]


def said(run: Run) -> list[str]:
    """All lines beside a table: the result in words, then the notes."""
    return [sentence(run.rows), *notes(run)]


def when(known: list[dict]) -> str:
    """When the first turn began, in UTC, and the minutes from there until the last one ended."""
    samples = records.of(known, "sample")
    begin, last = samples[0]["begin"], samples[-1]
    day = datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{day}, {(last['begin'] + last['conditions']['wall'] - begin) / 60:.0f} minutes"
