"""Makes the numbers of a run, a row a case, from its records alone.

Without pandas, which takes a second to import: the plots do not wait for it.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench import records, stats
from bench.cases import AGAIN, PLAIN, Case, compared_with, recorded
from bench.flops import peak
from bench.host import machine
from bench.records import counted, spans, speeds_by_block, step_seconds

COLUMNS = ["case", "script", "launcher", "backend", "technique", "precision", "world", "share"]
COLUMNS += ["devices"]
COLUMNS += ["local_batch", "workers", "threads", "status", "blocks", "rounds", "steps"]
for key in ("images_per_second", "ratio", "ddp_ratio", "overhead_share"):
    COLUMNS += [key, f"{key}_low", f"{key}_high"]
COLUMNS += ["claim", "ddp_claim", "between_starts", "between_turns", "efficiency", "window_steps"]
COLUMNS += [
    "window_p50_ms",
    "window_p95_ms",
    "data_share",
    "startup_seconds",
    "first_step_seconds",
    "memory_mib",
]
COLUMNS += ["largest_mib", "sent_mib", "idle", "loss", "distance", "mfu", "cost_per_million"]


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


def shared(setting: dict) -> bool:
    """Whether processes shared their devices, as on a CPU with --threads all. Otherwise each had a
    GPU or a core of its own. (The techniques in logs/ are of before this flag, and shared.)
    """
    return not setting["environment"]["gpus"] and setting["plan"].get("all_cores", True)


def references(rows: list[Case], shared: bool) -> dict[tuple[str, str], str]:
    """What claims are made of, by case and key: "ratio" to the plain script, which is the control's
    too, and "ddp_ratio" to DDP of as many processes. cases.compared_with says where.
    """
    found = {(row.name, "ratio"): PLAIN for row in rows if row.name == AGAIN}
    for row in rows:
        other = compared_with(row, rows, shared)
        found |= {(row.name, "ratio"): other.plain} if other.plain else {}
        found |= {(row.name, "ddp_ratio"): other.ddp} if other.ddp else {}
    return found


def compared(known: list[dict], good: dict) -> dict[tuple[str, str], stats.Logs]:
    """The log-ratios of each comparison that could be made, by case and key; good: the speeds of
    the cases that have one. As many claims are made, and hold together.
    """
    rows = [recorded(case) for case in known[0]["cases"] if case["name"] in good]
    which = references(rows, shared(known[0]))
    pairs = {key: stats.paired(good[key[0]], good[other]) for key, other in which.items()}
    return {key: logs for key, logs in pairs.items() if logs}


def speeds(known: list[dict]) -> dict:
    """Images/s by case, block and round, of the cases that have a speed."""
    why = reasons(known)
    return {name: found for name, found in speeds_by_block(known).items() if name not in why}


def by_case(known: list[dict]) -> list[dict]:
    """One row a case, in the ladder's order; the numbers of a case without a speed are None.

    The columns are COLUMNS, which docs/reference/benchmark.md explains. _low and _high are the ends
    of an interval by Student's t over the blocks, None with fewer than stats.FEWEST: of ratio (to
    the plain script) and ddp_ratio (to DDP of as many processes) the one that claim and ddp_claim
    use, at the level that all claims of the table share; of the others, and of a ratio without a
    claim, at 95%. images_per_second and ratios are geometric means over the blocks.
    """
    setting, gates = known[0], {r["case"]: r for r in records.of(known, "gate")}
    trials = {r["case"]: r for r in records.of(known, "trial")}
    why, good = reasons(known), speeds(known)
    samples: dict[str, list[dict]] = {}
    for sample in records.of(known, "sample"):
        samples.setdefault(sample["case"], []).append(sample)
    cases, logs = setting["cases"], compared(known, good)
    ratios = {which: stats.interval(values, len(logs)) for which, values in logs.items()}
    found = []
    for case in cases:
        name, gate = case["name"], gates.get(case["name"], {})
        row = dict.fromkeys(COLUMNS) | {"case": name}
        row |= {key: value for key, value in case.items() if key in COLUMNS}
        row |= amounts(case, setting["plan"])
        row["devices"] = None if shared(setting) else case["world"]
        row["distance"], row["loss"] = gate.get("distance"), gate.get("losses", [None])[-1]
        row["status"] = why.get(name, "ok" if name in good else "not run yet")
        if row["status"] == "ok":
            row |= speed(good[name], case, setting) | speed_up(case, good, setting)
            row |= claims(name, ratios) | overhead(case, cases, good, setting)
            row |= _details(samples[name], trials.get(name), case, records.of(known, "launch"))
            if not (setting["environment"]["gpus"] or shared(setting) or row["workers"]):
                row |= between_ranks(samples[name], case)
        found.append(row)
    return found


def amounts(case: dict, plan: dict) -> dict:
    """The images per step and process, and the workers of a loader."""
    batch = case.get("batch") or plan["batch_size"] // case["share"]
    workers = plan["workers"] if case.get("workers") is None else case["workers"]
    return {"local_batch": batch // case["world"], "workers": workers}


def speed_up(case: dict, good: dict, setting: dict) -> dict:
    """The ratio to the plain script, claim or none, with its 95% interval, and what follows."""
    logs = stats.paired(good[case["name"]], good.get(PLAIN, {}))
    if case["name"] == PLAIN or case["share"] > 1 or not logs:
        return {}
    row = _named("ratio", stats.interval(logs))
    between = dict(zip(("between_starts", "between_turns"), stats.spreads(logs), strict=True))
    efficiency = None if shared(setting) else row["ratio"] / case["world"]
    return row | between | {"efficiency": efficiency}


def overhead(case: dict, cases: list[dict], good: dict, setting: dict) -> dict:
    """The share of a step by which it is longer than that of one rank alone, 95% interval.

    That is all that a rank loses beside its peers: communication that nothing hides, waiting for
    the slowest, and contention for memory and caches. No record tells these apart.
    """
    rows = [recorded(row) for row in cases]
    other = compared_with(recorded(case), rows, shared(setting)).alone
    logs = stats.paired(good[case["name"]], good.get(other, {}))
    if case["precision"] != cases[0]["precision"] or case["technique"] or not logs:
        return {}
    shares = [None if x is None else 1 - x / case["world"] for x in stats.interval(logs)]
    return _named("overhead_share", (shares[0], shares[2], shares[1]))


def claims(name: str, ratios: dict[tuple[str, str], tuple]) -> dict:
    """The columns of a case's comparisons; the control has ratios, and claims nothing."""
    row, control = {}, ratios.get((AGAIN, "ratio"))
    for key, word in (("ratio", "claim"), ("ddp_ratio", "ddp_claim")):
        if ratio := ratios.get((name, key)):
            row |= _named(key, ratio)
            row[word] = None if name == AGAIN else stats.claim(ratio, control)
    return row


def speed(mine: dict, case: dict, setting: dict) -> dict:
    """The columns that follow from a case's images/s by block and round."""
    row = {"blocks": len(mine), "rounds": sum(len(turns) for turns in mine.values())}
    row |= _named("images_per_second", stats.interval(stats.logarithms(mine)))
    rate, price = row["images_per_second"], setting["plan"].get("price")
    gpus, how = setting["environment"]["gpus"], case["precision"]
    top, slow = peak(gpus, how), peak(gpus, "fp32" if how == "tf32" else how)
    if top and slow and (flops := setting.get("flops_per_image")):
        products = setting.get("flops_of_products", 0)  # in fp32, where torch uses TF32 otherwise
        least = (flops - products) / top + products / slow  # seconds of a GPU at its peak, an image
        row["mfu"] = rate * least / case["world"]
    if price:
        row["cost_per_million"] = price / 3600 / rate * 1e6
    return row


def _details(samples: list[dict], trial: dict | None, case: dict, launches: list[dict]) -> dict:
    """The columns that follow from a case's windows, starts and ends."""
    windows = [w for sample in samples for w in counted(sample)]
    means = [1000 * x for sample in samples for x in step_seconds(sample)]  # of a window each
    sizes = [steps for sample in samples for steps, _ in spans(sample)]
    starts = [(s["start"], s["windows"][0]) for s in samples if "start" in s]
    mine = [r for r in launches if r["case"] == case["name"] and r["at_once"] == 1]
    starts += [(r["start"], r["first"]) for r in mine]
    firsts = [first.get("first_step_seconds", first["seconds"]) for _, first in starts]
    return {
        "steps": sum(s["windows"][-1]["step"] - s["warm_up"] for s in samples),
        "window_steps": _median(sizes),
        "window_p50_ms": float(np.quantile(means, 0.5)),
        "window_p95_ms": float(np.quantile(means, 0.95)),
        "data_share": sum(w["data_seconds"] for w in windows) / sum(w["seconds"] for w in windows),
        "startup_seconds": _median([s["startup_seconds"] for s, _ in starts]),
        "first_step_seconds": _median(firsts),
        "memory_mib": _memory(case, [trial] if trial else samples),
    }


def between_ranks(samples: list[dict], case: dict) -> dict:
    """What ranks on cores of their own send in a step, in MiB, and the share of their idle time.

    Sent by all of them, as the loopback device counted it: the median of the windows, because other
    programs use that device, too. Idle: the share of their cores' time without computing. It
    includes a pipeline's bubble, stages that take unequally long, and the wait for messages.
    """
    windows = [span for sample in samples for span in spans(sample)]
    sent = [w["loopback_bytes"] / steps for steps, w in windows if "loopback_bytes" in w]
    turns = [s["conditions"] for s in samples if s["conditions"].get("cpu_seconds") is not None]
    turns = [] if "end" in samples[0] else turns  # with --fresh they have a start in them
    spent = sum(turn["wall"] for turn in turns) * case["world"] * case["threads"]
    used = sum(turn["cpu_seconds"] for turn in turns)
    return {
        "largest_mib": max((s["largest_mib"] for s in samples if "largest_mib" in s), default=None),
        "sent_mib": _median(sent) / 2**20 if sent else None,
        "idle": max(0.0, 1 - used / spent) if spent else None,
    }


def _memory(case: dict, seen: list[dict]) -> float | None:
    """The peak of all of a case's processes together, in MiB: of its trial, else of its samples.

    Where the sum was not measured, rank 0's times their number. Not of its gate, whose kernels are
    others: in double precision, they take twice as much.
    """
    totals = [record["memory_mib"] for record in seen if record.get("memory_mib")]
    if not totals:
        each = recorded(case).processes
        totals = [each * record["end"]["peak_memory_mib"] for record in seen if "end" in record]
    return max(totals, default=None)


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _named(key: str, values: tuple) -> dict:
    return dict(zip((key, f"{key}_low", f"{key}_high"), values, strict=True))


def title(known: list[dict]) -> str:
    """What was measured where, by which commit and when, in a line."""
    setting = known[0]
    plan, where = setting["plan"], machine(setting["environment"])
    torch = setting["environment"]["versions"]["torch"]
    commit = setting["environment"].get("git_commit")  # "" in a copy without .git
    changed = "" if setting["environment"].get("git_clean") else " with changes"
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
