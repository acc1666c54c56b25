"""What a run allows to say, in three sentences at most, and the legend of its table.

Nothing is claimed here that a row of summary.by_case does not claim.
"""

from statistics import median

from bench import records, stats
from bench.cases import AGAIN, DDP, PLAIN
from bench.show.summary import Run, compared, log_speeds, timed

CPU = "A CPU does not predict the order of the scripts on GPUs."
GPU = (
    "Waiting for data is the time that rank 0 waits for its loader. Its GPU computes what is "
    "queued meanwhile, so it waits at most that long."
)
NOISY = 0.1  # how far the control's interval may reach away from 1 without a word
WAITING = 0.1  # the share of a case's time that may be waiting for data without a word
OTHERS = {"ratio": PLAIN, "ddp_ratio": f"{DDP} with as many processes"}


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 case", "2 cases"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(texts: list[str]) -> str:
    """Texts as a list: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else ""


def span(middle: float, low: float | None, high: float | None, digits: int = 3) -> str:
    """A ratio with its interval: "0.842 [0.813, 0.893]"; alone, where it has none."""
    one, *ends = (f"{x:.{digits}f}" for x in (middle, low, high) if x is not None)
    return f"{one} [{', '.join(ends)}]" if ends else one


def control(rows: list[dict]) -> dict | None:
    """The row of the control, where it has a ratio."""
    return next((row for row in rows if row["case"] == AGAIN and row.get("ratio")), None)


def most_blocks(rows: list[dict]) -> int:
    """The blocks of the case that has most of them."""
    return max((row["blocks"] or 0 for row in rows), default=0)


def of_control(rows: list[dict]) -> str:
    """Whether the run was noisy, by the control."""
    again = control(rows)
    if not again:
        return "The control was not measured."
    low, high = again["ratio_low"], again["ratio_high"]
    if low is not None and (reach := max(high - 1, 1 - low)) > NOISY:
        return f"A noisy run: the control's interval reaches {reach:.0%} away from 1."
    return f"The control, a repeat of {PLAIN}, has the ratio {span(again['ratio'], low, high)}."


def of_claims(rows: list[dict]) -> str:
    """What the table claims; or that it claims nothing, and why. "" where it compares nothing."""
    parts, made = [], set()
    for key, other in OTHERS.items():
        claim = key.replace("ratio", "claim")
        made |= {row[claim] for row in timed(rows)} - {None}
        for word in ("slower", "faster"):
            mine = [row for row in timed(rows) if row[claim] == word]
            texts = [f"{row['case']} by {abs(row[key] - 1):.0%}" for row in mine]
            parts += [f"{word} than {other}: {listed(texts)}"] if texts else []
    if text := "; ".join(parts):
        return f"{text[0].upper()}{text[1:]}."
    if (blocks := most_blocks(rows)) < stats.FEWEST:
        return f"Nothing is claimed: {counted(blocks, 'block')}, and a claim needs {stats.FEWEST}."
    if made == {stats.NOTHING}:
        return f"Nothing is claimed: the control is missing, or off by more than {stats.LEAST:.0%}."
    return "No case is claimed to be slower or faster." if made else ""


def verdict(rows: list[dict]) -> str:
    """The control, the claims, and what was not measured, from the rows of summary.by_case."""
    missing = [row["case"] for row in rows if row["status"] != "ok"]
    sentences = [of_control(rows), of_claims(rows)]
    sentences += [f"Not measured: {listed(missing)}."] if missing else []
    return " ".join(filter(None, sentences))


def legend(run: Run) -> list[str]:
    """What a reader must know beside the numbers: the cases without a speed, then the method."""
    rows, lines, why = run.rows, [], {}
    for row in rows:
        if row["status"] != "ok":
            why.setdefault(row["status"], []).append(row["case"])
    lines += [f"{', '.join(cases)}: {status}" for status, cases in why.items()]
    last = [r for r in run.known if r["kind"] in ("stop", "sample")][-1]
    lines.append(
        f"{counted(most_blocks(rows), 'block')}: {last.get('reason', 'the run was cut short')}. "
        "Each block starts every case anew, and a ratio compares turns of the same round. "
        f"All claims of the table hold together at {stats.LEVEL:.0%}."
    )
    values = compared(run.known[0], log_speeds(run.known)).values()
    if least := [x for each in values if (x := stats.smallest(each, len(values)))]:
        lines.append(
            f"In {stats.FOUND:.0%} of such runs, a case that is truly {median(least):.0%} slower "
            f"is called *slower* (median over {counted(len(least), 'comparison')}; from "
            f"{min(least):.0%} to {max(least):.0%})."
        )
    samples = records.of(run.every, "sample")
    if dropped := [f"round {k}, {why}" for k, why in records.dropped(samples).items()]:
        lines.append(
            f"{len(dropped)} of {len({s['round'] for s in samples})} rounds left out for what else "
            f"the machine did ({'; '.join(dropped[:3])}{'; ...' if dropped[3:] else ''}); "
            "table-all.md has them all."
        )
    lines += [
        f"{row['case']} waits for data for {row['data_share']:.0%} of the time: its speed is also "
        "that of its loader."
        for row in timed(rows)
        if row["data_share"] > WAITING
    ]
    if any(row["precision"] != rows[0]["precision"] for row in timed(rows) if not row["technique"]):
        lines.append("A ratio of mnmc_apex.py also compares precisions: it computes in fp16.")
    lines.append(GPU if run.gpus else CPU)
    return [*lines, run.warning] if run.warning else lines
