"""A run in numbers, a row a case, from its records alone; the table and the plots show them.

Without pandas, which takes a second to import: the plots do not wait for it.
"""

import numpy as np

from bench.cases import AGAIN, PLAIN
from bench.flops import peak
from bench.host import machine
from bench.results import records
from bench.results.records import counted, speeds_by_round, step_seconds
from bench.results.stats import median_interval, ranks, ratio_interval, together, verdict

COLUMNS = ["case", "script", "launcher", "backend", "technique", "precision", "world", "share"]
COLUMNS += ["local_batch", "workers", "threads", "status", "rounds", "steps"]
for key in ("images_per_second", "ratio", "exposed_share"):
    COLUMNS += [key, f"{key}_low", f"{key}_high"]
COLUMNS += ["verdict", "rank", "efficiency", "step_p50_ms", "step_p95_ms", "data_share"]
COLUMNS += ["startup_seconds", "first_step_seconds", "memory_mib", "loss", "distance"]
COLUMNS += ["mfu", "cost_per_million"]


def usable(known: list[dict]) -> list[dict]:
    """The records without the rounds that the conditions alone tell to drop."""
    bad = records.dropped(records.of(known, "sample"))
    return [r for r in known if not (r["kind"] == "sample" and r["round"] in bad)]


def reasons(known: list[dict]) -> dict[str, str]:
    """What keeps a case from having a speed, by case."""
    found = {r["case"]: f"failed: {r['reason']}" for r in records.of(known, "failure")}
    for r in records.of(known, "gate"):
        if not r["passed"]:
            found[r["case"]] = f"failed the gate: {r['reason']}"
    return found | {r["case"]: f"skipped: {r['reason']}" for r in records.of(known, "skip")}


def by_case(known: list[dict]) -> list[dict]:
    """One row a case, in the ladder's order; the numbers of a case without a speed are None.

    The columns are COLUMNS. _low and _high are the ends of a 95% interval over the rounds; ratio is
    to the plain script, paired by round; rank as in stats.ranks; efficiency is the ratio over the
    GPUs at work (on a CPU all cases use the same cores, and it is the ratio). step_p50_ms and
    step_p95_ms are over windows of some steps. exposed_share is what a step takes longer than that
    of one rank alone at the same local batch, as a share of it: the communication that computing
    does not hide. startup_seconds end before the first step, first_step_seconds are of that step;
    both of launches that had the machine to themselves. loss is the gate's last, distance the
    largest relative one of the compared losses. mfu: the model's FLOP/s over the device's peak;
    cost: of a million images, in the unit of --price.
    """
    setting, gates = known[0], {r["case"]: r for r in records.of(known, "gate")}
    why, speeds = reasons(known), speeds_by_round(known)
    samples: dict[str, list[dict]] = {}
    for sample in records.of(known, "sample"):
        samples.setdefault(sample["case"], []).append(sample)
    good = {name: speeds[name] for name in speeds if name not in why}
    control = ratio_interval(good.get(AGAIN, {}), good.get(PLAIN, {}))
    # What the first results in logs/ do not say:
    first = {"share": 1, "precision": "fp32", "technique": ""}
    cases = [first | case for case in setting["cases"]]
    same = {case["name"] for case in cases if case["share"] == 1} - {AGAIN}
    placed = ranks({name: values for name, values in good.items() if name in same}, control)
    level = together(len(same & good.keys()) - 1)
    alone = {case["share"]: good.get(case["name"], {}) for case in cases}
    found = []
    for case in cases:
        name, gate = case["name"], gates.get(case["name"], {})
        row = dict.fromkeys(COLUMNS) | {"case": name}
        row |= {key: value for key, value in case.items() if key in COLUMNS}
        row["local_batch"] = setting["plan"]["batch_size"] // max(case["world"], case["share"])
        row["workers"] = setting["plan"]["workers"]
        row["distance"], row["loss"] = gate.get("distance"), gate.get("losses", [None])[-1]
        row["status"] = why.get(name, "ok" if name in good else "not run yet")
        if row["status"] == "ok":
            row |= speed(good[name], good.get(PLAIN, {}), case, setting)
            row["rank"] = placed.get(name)
            if name != PLAIN and case["share"] == 1:
                ratio = ratio_interval(good[name], good.get(PLAIN, {}), level)
                row["verdict"] = verdict(ratio, control, row["rounds"])
            same_work = case["precision"] == cases[0]["precision"] and not case["technique"]
            pair = ratio_interval(good[name], alone.get(case["world"], {}))
            if case["world"] > 1 and same_work and pair:
                shares = [1 - x / case["world"] for x in pair]
                row |= _named("exposed_share", (shares[0], shares[2], shares[1]))
            row |= _details(samples[name], gate, records.of(known, "launch"))
        found.append(row)
    return found


def speed(mine: dict, reference: dict, case: dict, setting: dict) -> dict:
    """The columns that follow from a case's images/s by round."""
    row = {"rounds": len(mine)} | _named("images_per_second", median_interval([*mine.values()]))
    devices = case["world"] if setting["environment"]["gpus"] else 1
    if case["share"] == 1 and (ratio := ratio_interval(mine, reference)):
        row |= _named("ratio", ratio) | {"efficiency": ratio[0] / devices}
    rate, price = row["images_per_second"], setting["plan"].get("price")
    top = peak(setting["environment"]["gpus"], case["precision"])
    if top and setting.get("flops_per_image"):
        row["mfu"] = rate * setting["flops_per_image"] / (top * devices)
    if price:
        row["cost_per_million"] = price / 3600 / rate * 1e6
    return row


def _details(samples: list[dict], gate: dict, launches: list[dict]) -> dict:
    """The columns that follow from a case's windows, starts and ends."""
    name = samples[0]["case"]
    windows = [w for sample in samples for w in counted(sample)]
    steps = [1000 * x for sample in samples for x in step_seconds(sample)]
    starts = [(s["start"], s["windows"][0]) for s in samples if "start" in s]
    mine = [r for r in launches if r["case"] == name and r.get("at_once", 1) == 1]
    starts += [(r["start"], r["first"]) for r in mine]
    ends = [record["end"] for record in (gate, *samples) if "end" in record]
    return {
        "steps": sum(s["windows"][-1]["step"] - s["warm_up"] for s in samples),
        "step_p50_ms": float(np.quantile(steps, 0.5)),
        "step_p95_ms": float(np.quantile(steps, 0.95)),
        "data_share": sum(w["data_seconds"] for w in windows) / sum(w["seconds"] for w in windows),
        "startup_seconds": median_interval([s["startup_seconds"] for s, _ in starts])[0],
        "first_step_seconds": median_interval([first["seconds"] for _, first in starts])[0],
        "memory_mib": max((end["peak_memory_mib"] for end in ends), default=None),
    }


def _named(key: str, values: tuple) -> dict:
    return dict(zip((key, f"{key}_low", f"{key}_high"), values, strict=True))


def title(known: list[dict]) -> str:
    """What was measured where, in a line."""
    setting = known[0]
    plan, where = setting["plan"], machine(setting["environment"])
    torch = setting["environment"]["versions"]["torch"]
    workers = f", {plan['workers']} workers in all" if plan["dataset"] == "imagenet" else ""
    return (
        f"{plan['arch']} on {setting['title']}, global batch {plan['batch_size']}{workers}; "
        f"{where}; torch {torch}"
    )
