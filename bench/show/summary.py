"""Makes the numbers of a run, a row a case, from its records alone."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from bench import records, stats
from bench.cases import AGAIN, PLAIN, compared_with, recorded
from bench.flops import peak
from bench.host import machine

COLUMNS = """
    case script launcher backend technique precision world share devices
    local_batch workers threads status blocks rounds steps
    images_per_second images_per_second_low images_per_second_high ratio ratio_low ratio_high
    ddp_ratio ddp_ratio_low ddp_ratio_high overhead_share overhead_share_low overhead_share_high
    claim ddp_claim between_starts between_turns efficiency window_steps window_p50_ms
    window_p95_ms data_share startup_seconds first_step_seconds memory_mib
    largest_mib sent_mib idle loss distance mfu
""".split()
WINDOW = ["case", "block", "round", "steps", "images", "seconds", "data_seconds", "loopback_bytes"]


@dataclass(frozen=True)
class Run:
    """What tables, plots and page are made of: the records of a folder, those without the rounds to
    drop, and of these a row a case; a warning where records are lost.
    """

    folder: Path
    every: list[dict]
    known: list[dict]
    rows: list[dict]
    warning: str | None

    @classmethod
    def of(cls, folder: Path) -> "Run":
        """Reads a folder; raises UserError where no case was timed."""
        every, warning = records.measured(folder)
        known = usable(every)
        return cls(folder, every, known, by_case(known), warning)

    @property
    def gpus(self) -> list[str]:
        """The names of the machine's GPUs."""
        return self.known[0]["environment"]["gpus"]


def timed(rows: list[dict]) -> list[dict]:
    """The rows that have a speed at the whole global batch, snsc.py among them."""
    return [row for row in rows if row["status"] == "ok" and row["share"] == 1]


def usable(known: list[dict]) -> list[dict]:
    """The records without the rounds that the conditions alone tell to drop."""
    bad = records.dropped(records.of(known, "sample"))
    return [r for r in known if not (r["kind"] == "sample" and r["round"] in bad)]


def reasons(known: list[dict]) -> dict[str, str]:
    """What keeps a case from having a speed, by case.

    Where the plain script failed, what was measured before stands: the run has ended with it.
    """
    timed = {r["case"] for r in records.of(known, "sample")}
    failures = [r for r in records.of(known, "failure") if not r["case"] == PLAIN or not timed]
    found = {r["case"]: f"failed: {r['reason']}" for r in failures}
    for r in records.of(known, "gate"):
        if not r["passed"]:
            found[r["case"]] = f"failed the gate: {r['reason']}"
    return found | {r["case"]: f"skipped: {r['reason']}" for r in records.of(known, "skip")}


def windows(known: list[dict]) -> pd.DataFrame:
    """The windows of all turns that count, a row each; its columns are WINDOW."""
    rows = [
        window
        | {"case": sample["case"], "block": sample["block"], "round": sample["round"]}
        | {"steps": steps}
        for sample in records.of(known, "sample")
        for steps, window in records.spans(sample)
    ]
    return pd.DataFrame(rows, columns=WINDOW)


def log_speeds(known: list[dict]) -> pd.DataFrame:
    """The logarithm of images/s, a row a turn (block, round), and a column for each case that has a
    speed. NaN where a case has no such turn.

    Images/s of a turn are all its images over all its seconds, never a mean of rates.
    """
    sums = windows(known).groupby(["case", "block", "round"])[["images", "seconds"]].sum()
    speeds = np.log(sums["images"] / sums["seconds"]).unstack("case")
    return speeds.drop(columns=[*reasons(known)], errors="ignore")


def log_ratios(speeds: pd.DataFrame, case: str, other: str | None) -> pd.Series:
    """The log-ratios of two cases in the turns that both had; empty where one has no speed."""
    if case not in speeds or other not in speeds:
        return pd.Series(dtype=float, index=speeds.index[:0])
    return (speeds[case] - speeds[other]).dropna()


def compared(setting: dict, speeds: pd.DataFrame) -> dict[tuple[str, str], pd.Series]:
    """Each comparison that could be made: its log-ratios by block, by case and key. As many claims
    are made, and hold together.

    The key is "ratio" to the plain script, which is the control's too, or "ddp_ratio" to DDP of as
    many processes. cases.compared_with says where.
    """
    rows = [recorded(case) for case in setting["cases"] if case["name"] in speeds]
    found = {}
    for row in rows:
        other = compared_with(row, rows)
        plain = PLAIN if row.name == AGAIN else other.plain
        found[row.name, "ratio"] = log_ratios(speeds, row.name, plain)
        found[row.name, "ddp_ratio"] = log_ratios(speeds, row.name, other.ddp)
    return {which: stats.block_means(logs) for which, logs in found.items() if len(logs)}


def by_case(known: list[dict]) -> list[dict]:
    """One row a case, in the ladder's order; the numbers of a case without a speed are None.

    The columns are COLUMNS, which docs/reference/benchmark.md explains. _low and _high are the ends
    of an interval by Student's t over the blocks, None with fewer than stats.FEWEST: of ratio (to
    the plain script) and ddp_ratio (to DDP of as many processes) the one that claim and ddp_claim
    use, at the level that all claims of the table share; of the others, and of a ratio without a
    claim, at 95%. images_per_second and ratios are geometric means over the blocks.
    """
    setting, why, speeds = known[0], reasons(known), log_speeds(known)
    gates = {r["case"]: r for r in records.of(known, "gate")}
    by_name = {name: part for name, part in windows(known).groupby("case")}
    logs = compared(setting, speeds)
    ratios = {which: stats.interval(values, len(logs)) for which, values in logs.items()}
    found = []
    for case in setting["cases"]:
        name, gate = case["name"], gates.get(case["name"], {})
        row = dict.fromkeys(COLUMNS) | {"case": name}
        row |= {key: value for key, value in case.items() if key in COLUMNS}
        row |= amounts(case, setting["plan"])
        row["devices"] = case["world"]
        row["distance"], row["loss"] = gate.get("distance"), gate.get("losses", [None])[-1]
        row["status"] = why.get(name, "ok" if name in speeds else "not run yet")
        if row["status"] == "ok":
            samples = [r for r in records.of(known, "sample") if r["case"] == name]
            row |= speed(speeds[name].dropna(), case, setting) | speed_up(case, speeds, ratios)
            row |= claims(name, ratios) | overhead(case, speeds, setting)
            row |= steps(by_name[name]) | starts(name, samples, records.of(known, "launch"))
            row["memory_mib"] = memory(case, samples)
            if not (setting["environment"]["gpus"] or row["workers"]):
                row |= between_ranks(samples, by_name[name], case)
        found.append(row)
    return found


def amounts(case: dict, plan: dict) -> dict:
    """The images per step and process, and the workers of a loader."""
    batch = case.get("batch") or plan["batch_size"] // case["share"]
    workers = plan["workers"] if case.get("workers") is None else case["workers"]
    return {"local_batch": batch // case["world"], "workers": workers}


def speed(logs: pd.Series, case: dict, setting: dict) -> dict:
    """The columns that follow from the logarithm of a case's images/s by turn."""
    values = stats.block_means(logs)
    row = {"blocks": len(values), "rounds": len(logs)}
    row |= named("images_per_second", stats.interval(values))
    rate = row["images_per_second"]
    gpus, how = setting["environment"]["gpus"], case["precision"]
    top, slow = peak(gpus, how), peak(gpus, "fp32" if how == "tf32" else how)
    if top and slow and (flops := setting.get("flops_per_image")):
        products = setting.get("flops_of_products", 0)  # in fp32, where torch uses TF32 otherwise
        least = (flops - products) / top + products / slow  # seconds of a GPU at its peak, an image
        row["mfu"] = rate * least / case["world"]
    return row


def speed_up(case: dict, speeds: pd.DataFrame, ratios: dict[tuple[str, str], tuple]) -> dict:
    """The ratio to the plain script, claim or none, and what follows; with the interval of ratios,
    or where it has none, a 95% one.
    """
    logs = log_ratios(speeds, case["name"], PLAIN)
    if case["name"] == PLAIN or case["share"] > 1 or not len(logs):
        return {}
    joint = ratios.get((case["name"], "ratio"))
    row = named("ratio", joint or stats.interval(stats.block_means(logs)))
    row["between_starts"], row["between_turns"] = stats.spreads(logs)
    row["efficiency"] = row["ratio"] / case["world"]
    return row


def overhead(case: dict, speeds: pd.DataFrame, setting: dict) -> dict:
    """The share of a step by which it is longer than that of one rank alone, 95% interval.

    That is all that a rank loses beside its peers: communication that nothing hides, waiting for
    the slowest, and contention for memory and caches. No record tells these apart.
    """
    cases = setting["cases"]
    other = compared_with(recorded(case), [*map(recorded, cases)]).alone
    logs = log_ratios(speeds, case["name"], other)
    if case["precision"] != cases[0]["precision"] or case["technique"] or not len(logs):
        return {}
    found = stats.interval(stats.block_means(logs))
    middle, low, high = (None if x is None else 1 - x / case["world"] for x in found)
    return named("overhead_share", (middle, high, low))


def claims(name: str, ratios: dict[tuple[str, str], tuple]) -> dict:
    """The ratio to DDP, and what a case's ratios allow to claim; the control claims nothing."""
    if name == AGAIN:
        return {}
    control, ddp = ratios.get((AGAIN, "ratio")), ratios.get((name, "ddp_ratio"))
    found = {"claim": stats.claim(ratios.get((name, "ratio")), control)}
    found["ddp_claim"] = stats.claim(ddp, control)
    return found | (named("ddp_ratio", ddp) if ddp else {})


def steps(mine: pd.DataFrame) -> dict:
    """The columns that follow from a case's windows."""
    milliseconds = 1000 * mine["seconds"] / mine["steps"]  # a step's, the mean of a window
    return {
        "steps": int(mine["steps"].sum()),
        "window_steps": float(mine["steps"].median()),
        "window_p50_ms": float(milliseconds.quantile(0.5)),
        "window_p95_ms": float(milliseconds.quantile(0.95)),
        "data_share": float(mine["data_seconds"].sum() / mine["seconds"].sum()),
    }


def starts(name: str, samples: list[dict], launches: list[dict]) -> dict:
    """Seconds from the launcher's start to the first step, and of that step, while nothing else
    starts (medians).
    """
    found = [(s["start"], s["windows"][0]) for s in samples if "start" in s]
    mine = [r for r in launches if r["case"] == name and r["at_once"] == 1]
    found += [(r["start"], r["first"]) for r in mine]
    if not found:
        return {}
    firsts = [first.get("first_step_seconds", first["seconds"]) for _, first in found]
    startups = [start["startup_seconds"] for start, _ in found]
    return {
        "startup_seconds": float(np.median(startups)),
        "first_step_seconds": float(np.median(firsts)),
    }


def memory(case: dict, samples: list[dict]) -> float | None:
    """The peak of all of a case's processes together, in MiB.

    Where the sum was not measured, rank 0's times their number. Not of its gate, whose kernels are
    others: in double precision, they take twice as much.
    """
    totals = [sample["memory_mib"] for sample in samples if "memory_mib" in sample]
    if not totals:
        each = recorded(case).processes
        totals = [each * sample["end"]["peak_memory_mib"] for sample in samples if "end" in sample]
    return max(totals, default=None)


def between_ranks(samples: list[dict], mine: pd.DataFrame, case: dict) -> dict:
    """What ranks on cores of their own send in a step, in MiB, and the share of their idle time.

    Sent by all of them, as the loopback device counted it: the median of the windows, because other
    programs use that device, too. Idle: the share of their cores' time without computing. It
    includes a pipeline's bubble, stages that take unequally long, and the wait for messages.
    """
    sent = (mine["loopback_bytes"] / mine["steps"]).median()  # of the windows that have it
    turns = [s["conditions"] for s in samples if s["conditions"].get("cpu_seconds") is not None]
    turns = [] if "end" in samples[0] else turns  # with --fresh they have a start in them
    spent = sum(turn["wall"] for turn in turns) * case["world"] * case["threads"]
    used = sum(turn["cpu_seconds"] for turn in turns)
    return {
        "largest_mib": max((s["largest_mib"] for s in samples if "largest_mib" in s), default=None),
        "sent_mib": None if pd.isna(sent) else float(sent) / 2**20,
        "idle": max(0.0, 1 - used / spent) if spent else None,
    }


def named(key: str, values: tuple) -> dict:
    """The columns of a number and the ends of its interval."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), values, strict=True))


def title(known: list[dict]) -> str:
    """What was measured where, by which commit and when, in a line."""
    setting = known[0]
    plan, where = setting["plan"], machine(setting["environment"])
    torch = setting["environment"]["versions"]["torch"]
    commit = setting["environment"].get("git_commit")  # "" in a copy without .git
    clean = setting["environment"].get("git_clean")
    changed = {True: "", False: " with changes"}.get(clean, " with or without changes")
    begins = [sample["begin"] for sample in records.of(known, "sample")]
    day = [datetime.fromtimestamp(min(begins), UTC).strftime("%Y-%m-%d")] if begins else []
    by = [f"commit {commit[:7]}{changed}"] if commit else []
    weak = plan["scaling"] == "weak"
    device = "GPU" if setting["environment"]["gpus"] else "core"
    size = plan["batch_size"]
    batch = f"{size} images per {device}" if weak else f"global batch {size}"
    workers = f", {plan['workers']} workers each" if plan["workers"] else ""
    return f"{plan['arch']} on {setting['title']}, {batch}{workers}; " + "; ".join(
        [where, f"torch {torch}", *by, *day]
    )
