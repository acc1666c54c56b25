"""The tidy table of a run, and table.md, table.csv from it; all of it from the records alone."""

from pathlib import Path

import pandas as pd

from bench import records
from bench.cases import AGAIN, PLAIN
from bench.conditions import dropped
from bench.environment import machine, peak
from bench.run import counted, speeds_by_round, step_seconds
from bench.stats import FEWEST, median_interval, ranks, ratio_interval, verdict

COLUMNS = ["case", "script", "launcher", "backend", "precision", "world", "share", "local_batch"]
COLUMNS += ["workers", "threads", "status", "rounds", "steps"]
for key in ("images_per_second", "ratio", "exposed_share"):
    COLUMNS += [key, f"{key}_low", f"{key}_high"]
COLUMNS += ["verdict", "rank", "efficiency", "step_p50_ms", "step_p95_ms", "data_share"]
COLUMNS += ["startup_seconds", "first_step_seconds", "memory_mib", "loss", "distance"]
COLUMNS += ["mfu", "cost_per_million"]


def usable(known: list[dict]) -> list[dict]:
    """The records without the rounds that the conditions alone tell to drop."""
    bad = dropped(records.of(known, "sample"))
    return [r for r in known if not (r["kind"] == "sample" and r["round"] in bad)]


def reasons(known: list[dict]) -> dict[str, str]:
    """What keeps a case from having a speed, by case."""
    found = {r["case"]: f"failed: {r['reason']}" for r in records.of(known, "failure")}
    for r in records.of(known, "gate"):
        if not r["passed"]:
            found[r["case"]] = f"failed the gate: {r['reason']}"
    return found | {r["case"]: f"skipped: {r['reason']}" for r in records.of(known, "skip")}


def tidy(known: list[dict]) -> pd.DataFrame:
    """One row a case, in the ladder's order; the numbers of a case without a speed are missing.

    The columns are COLUMNS. _low and _high are the ends of a 95% interval over the rounds; ratio is
    to the plain script, paired by round; rank as in stats.ranks; efficiency is the ratio over the
    GPUs at work (on a CPU all cases use the same cores, and it is the ratio). step_p50_ms and
    step_p95_ms are over windows of some steps. exposed_share is what a step takes longer than that
    of one rank alone at the same local batch, as a share of it: the communication that computing
    does not hide. startup_seconds end before the first step, first_step_seconds are of that step.
    loss is the gate's last, distance the largest relative one from the oracle's losses. mfu: the
    model's FLOP/s over the device's peak; cost: of a million images, in the unit of --price.
    """
    setting, gates = known[0], {r["case"]: r for r in records.of(known, "gate")}
    why, speeds = reasons(known), speeds_by_round(known)
    samples: dict[str, list[dict]] = {}
    for sample in records.of(known, "sample"):
        samples.setdefault(sample["case"], []).append(sample)
    good = {name: speeds[name] for name in speeds if name not in why}
    control = ratio_interval(good.get(AGAIN, {}), good.get(PLAIN, {}))
    first = {"share": 1, "precision": "fp32"}  # what the first results in logs/ do not say
    cases = [first | case for case in setting["cases"]]
    same = {case["name"] for case in cases if case["share"] == 1} - {AGAIN}
    placed = ranks({name: values for name, values in good.items() if name in same}, control)
    alone = {case["share"]: good.get(case["name"], {}) for case in cases}
    rows = []
    for case in cases:
        name, gate = case["name"], gates.get(case["name"], {})
        row = {key: value for key, value in case.items() if key in COLUMNS} | {"case": name}
        row["local_batch"] = setting["plan"]["batch_size"] // max(case["world"], case["share"])
        row["workers"] = setting["plan"]["workers"]
        row["distance"], row["loss"] = gate.get("distance"), gate.get("losses", [None])[-1]
        row["status"] = why.get(name, "ok" if name in good else "not run yet")
        if row["status"] == "ok":
            row |= speed(good[name], good.get(PLAIN, {}), case, setting)
            row["rank"] = placed.get(name)
            if name != PLAIN and case["share"] == 1:
                row["verdict"] = verdict(_triple(row, "ratio"), control, row["rounds"])
            if case["world"] > 1 and (
                pair := ratio_interval(good[name], alone.get(case["world"], {}))
            ):
                shares = [1 - x / case["world"] for x in pair]
                row |= _named("exposed_share", (shares[0], shares[2], shares[1]))
            row |= _details(samples[name], gate, records.of(known, "launch"))
        rows.append(row)
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


def speed(mine: dict, reference: dict, case: dict, setting: dict) -> dict:
    """The columns that follow from a case's images/s by round."""
    row = {"rounds": len(mine)} | _named("images_per_second", median_interval([*mine.values()]))
    devices = case["world"] if setting["environment"]["gpus"] else 1
    if case["share"] == 1 and (ratio := ratio_interval(mine, reference)):
        row |= _named("ratio", ratio) | {"efficiency": ratio[0] / devices}
    rate, price = row["images_per_second"], setting["plan"].get("price")
    top = peak(setting["environment"], case["precision"])
    if top and setting.get("flops_per_image"):
        row["mfu"] = rate * setting["flops_per_image"] / (top * devices)
    if price:
        row["cost_per_million"] = price / 3600 / rate * 1e6
    return row


def _details(samples: list[dict], gate: dict, launches: list[dict]) -> dict:
    """The columns that follow from a case's windows, starts and ends."""
    name = samples[0]["case"]
    windows = [w for sample in samples for w in counted(sample)]
    steps = pd.Series([1000 * x for sample in samples for x in step_seconds(sample)])
    starts = [(s["start"], s["windows"][0]) for s in samples if "start" in s]
    starts += [(r["start"], r["first"]) for r in launches if r["case"] == name]
    ends = [record["end"] for record in (gate, *samples) if "end" in record]
    return {
        "steps": sum(s["windows"][-1]["step"] - s["warm_up"] for s in samples),
        "step_p50_ms": steps.quantile(0.5),
        "step_p95_ms": steps.quantile(0.95),
        "data_share": sum(w["data_seconds"] for w in windows) / sum(w["seconds"] for w in windows),
        "startup_seconds": median_interval([s["startup_seconds"] for s, _ in starts])[0],
        "first_step_seconds": median_interval([first["seconds"] for _, first in starts])[0],
        "memory_mib": max((end["peak_memory_mib"] for end in ends), default=None),
    }


def _named(key: str, values: tuple) -> dict:
    return dict(zip((key, f"{key}_low", f"{key}_high"), values, strict=True))


def _triple(row: dict, key: str) -> tuple | None:
    return tuple(row[f"{key}{end}"] for end in ("", "_low", "_high")) if key in row else None


def title(known: list[dict]) -> str:
    """What was measured where, in a line."""
    setting = known[0]
    plan, where = setting["plan"], machine(setting["environment"])
    torch = setting["environment"]["versions"]["torch"]
    return (
        f"{plan['arch']} on {setting['title']}, global batch {plan['batch_size']}, "
        f"{plan['workers']} workers in all; {where}; torch {torch}"
    )


# What fits on a terminal; table.md has all columns.
NARROW = ["case", "images/s [95%]", "against snsc.py [95%]", "rank", "verdict"]
NARROW += ["waiting for data", "exposed communication", "off the oracle"]


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people: rounded, with units, and a reason where there is no speed."""

    def number(row, key, text):
        return "" if pd.isna(row[key]) else text.format(row[key])

    def interval(row, key, text):
        if pd.isna(row[key]):
            return ""
        middle, low, high = (text.format(row[f"{key}{end}"]) for end in ("", "_low", "_high"))
        return f"{middle} [{low}, {high}]"

    rows = []
    for _, row in frame.iterrows():
        middle, late = number(row, "step_p50_ms", "{:,.0f}"), number(row, "step_p95_ms", "{:,.0f}")
        cells = {"case": row["case"], "local batch": row["local_batch"]}
        cells["images/s [95%]"] = interval(row, "images_per_second", "{:,.0f}")
        if row["status"] != "ok":
            cells["images/s [95%]"] = row["status"]
        cells["against snsc.py [95%]"] = interval(row, "ratio", "{:.3f}")
        cells["rank"] = number(row, "rank", "{:.0f}")
        cells["verdict"] = number(row, "verdict", "{}")
        cells["efficiency"] = number(row, "efficiency", "{:.0%}")
        cells["step ms, p50 / p95"] = middle and f"{middle} / {late}"
        cells["waiting for data"] = number(row, "data_share", "{:.1%}")
        cells["exposed communication"] = interval(row, "exposed_share", "{:.0%}")
        cells["start-up s"] = number(row, "startup_seconds", "{:.1f}")
        cells["first step s"] = number(row, "first_step_seconds", "{:.2f}")
        cells["peak MiB"] = number(row, "memory_mib", "{:,.0f}")
        cells["off the oracle"] = number(row, "distance", "{:.0e}").replace("0e+00", "0")
        cells["MFU"] = number(row, "mfu", "{:.1%}")
        cells["cost of a million"] = number(row, "cost_per_million", "{:.3g}")
        cells["backend"] = number(row, "backend", "{}")
        rows.append(cells)
    people = pd.DataFrame(rows)
    return people.loc[:, [name for name in people if name == "case" or people[name].any()]]


def notes(known: list[dict], frame: pd.DataFrame, warning: str | None) -> list[str]:
    """What a reader must know beside the numbers."""
    rounds = int(frame["rounds"].max()) if frame["rounds"].notna().any() else 0
    stops, plan = records.of(known, "stop"), known[0]["plan"]
    why = f": {stops[-1]['reason']}" if stops else ": the run was cut short"
    how = "; every case was started afresh in each"
    if plan.get("precise"):
        launches = max((r["launch"] for r in records.of(known, "launch")), default=0)
        how = f"; the cases stayed started and took short turns, {launches} "
        how += "launches of each" if launches > 1 else "launch of each"
    lines = [f"{rounds} round{'s' * (rounds != 1)}{why}{how}."]
    lines[0] += " Intervals over the rounds, ratios paired within a round."
    samples = records.of(known, "sample")
    if bad := dropped(samples):
        worst = "; ".join(f"round {k}, {text}" for k, text in list(bad.items())[:3])
        lines.append(
            f"{len(bad)} of {len({s['round'] for s in samples})} rounds are left out for what else "
            f"the machine did ({worst}{'; ...' * (len(bad) > 3)}); table-all.md has them all."
        )
    control = frame[frame["case"] == AGAIN].iloc[0]
    if not pd.isna(control["ratio"]):
        text = f"The control, {AGAIN}: {control['ratio']:.3f} "
        text += f"[{control['ratio_low']:.3f}, {control['ratio_high']:.3f}]"
        noisy = not control["ratio_low"] <= 1 <= control["ratio_high"] and rounds >= FEWEST
        lines.append(text + ("; this machine is too noisy to rank." if noisy else "."))
    if rounds < FEWEST:
        lines.append(f"With fewer than {FEWEST} rounds nothing is ranked.")
    if frame["rank"].notna().any():
        lines.append("Cases of one rank are tied: a rank is 1 and as many as are faster.")
    if frame["exposed_share"].notna().any():
        lines.append(
            "Exposed communication: the share of a step by which it is longer than one rank's "
            "alone, with the same local batch and threads; on a CPU it holds the fight for memory."
        )
    if not known[0]["environment"]["gpus"]:
        lines.append("A table from a CPU does not predict the order on GPUs.")
    return lines + ([warning] if warning else [])


def markdown(frame: pd.DataFrame) -> str:
    """A table in GitHub's Markdown."""
    rows = [
        [str(cell).replace("|", "\\|") for cell in row] for row in frame.itertuples(index=False)
    ]
    lines = [list(frame.columns), ["---"] * len(frame.columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(folder: Path) -> tuple[str, pd.DataFrame, list[str]]:
    """Makes table.md and table.csv of a folder's records; returns the title, table and notes.

    Where rounds are dropped, table-all.md and table-all.csv are made of all of them.

    Raises records.BadRecords.
    """
    known, warning = records.measured(folder)
    kept, heading = usable(known), title(known)
    for name, part in (("table-all", known), ("table", kept)):
        if name == "table-all" and len(known) == len(kept):
            for suffix in (".md", ".csv"):  # of an earlier call
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
            continue
        frame = tidy(part)
        people, remarks = shown(frame), notes(known, frame, warning)
        text = f"**{heading}**\n\n{markdown(people)}\n" + "".join(f"- {x}\n" for x in remarks)
        replace(folder / f"{name}.md", text)
        replace(folder / f"{name}.csv", frame.to_csv(index=False))
    return heading, people, remarks


def replace(path: Path, text: str) -> None:
    """Writes a file whole, or leaves it as it was."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
