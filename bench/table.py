"""The tidy table of a run, and table.md, table.csv from it; all of it from the records alone."""

from pathlib import Path

import pandas as pd

from bench import records
from bench.cases import AGAIN, PLAIN
from bench.environment import machine
from bench.run import counted, speeds_by_round
from bench.stats import median_interval, ratio_interval, verdict


def tidy(known: list[dict]) -> pd.DataFrame:
    """One row a case, in the ladder's order; the numbers of a case without a speed are missing.

    Columns: case, script, launcher, world, local_batch, threads, status, rounds, images_per_second
    with _low and _high (median and 95% interval over the rounds), ratio with _low and _high (to the
    plain script, paired by round), verdict, data_share, startup_seconds, memory_mib, distance.
    """
    setting, speeds = known[0], speeds_by_round(known)
    gates = {r["case"]: r for r in records.of(known, "gate")}
    failures = {r["case"]: r["reason"] for r in records.of(known, "failure")}
    skips = {r["case"]: r["reason"] for r in records.of(known, "skip")}
    samples: dict[str, list[dict]] = {}
    for sample in records.of(known, "sample"):
        samples.setdefault(sample["case"], []).append(sample)
    control = ratio_interval(speeds.get(AGAIN, {}), speeds.get(PLAIN, {}))
    rows = []
    for case in setting["cases"]:
        name, gate = case["name"], gates.get(case["name"])
        row = {k: case[k] for k in ("script", "launcher", "world", "threads")} | {"case": name}
        row["local_batch"] = setting["plan"]["batch_size"] // case["world"]
        row["distance"] = gate["distance"] if gate else None
        if name in skips:
            row["status"] = f"skipped: {skips[name]}"
        elif gate and not gate["passed"]:
            row["status"] = f"failed the gate: {gate['reason']}"
        elif name in failures:
            row["status"] = f"failed: {failures[name]}"
        elif name not in samples:
            row["status"] = "not run yet"
        else:
            row["status"] = "ok"
            values = speeds[name]
            row["rounds"] = len(values)
            for key, part in zip(
                ("", "_low", "_high"), median_interval([*values.values()]), strict=True
            ):
                row[f"images_per_second{key}"] = part
            ratio = ratio_interval(values, speeds.get(PLAIN, {}))
            for key, part in zip(("", "_low", "_high"), ratio or (None,) * 3, strict=True):
                row[f"ratio{key}"] = part
            row["verdict"] = "" if name == PLAIN else verdict(ratio, control, len(values))
            windows = [w for sample in samples[name] for w in counted(sample)]
            waited = sum(w["data_seconds"] for w in windows)
            row["data_share"] = waited / sum(w["seconds"] for w in windows)
            starts = [s["start"]["startup_seconds"] for s in samples[name]]
            row["startup_seconds"] = median_interval(starts)[0]
            row["memory_mib"] = max(s["end"]["peak_memory_mib"] for s in samples[name])
        rows.append(row)
    columns = ["case", "script", "launcher", "world", "local_batch", "threads", "status", "rounds"]
    for key in ("images_per_second", "ratio"):
        columns += [key, f"{key}_low", f"{key}_high"]
    columns += ["verdict", "data_share", "startup_seconds", "memory_mib", "distance"]
    return pd.DataFrame(rows).reindex(columns=columns)


def title(known: list[dict]) -> str:
    """What was measured where, in a line."""
    setting = known[0]
    plan, where = setting["plan"], machine(setting["environment"])
    torch = setting["environment"]["versions"]["torch"]
    return (
        f"{plan['arch']} on {setting['title']}, global batch {plan['batch_size']}, "
        f"{plan['workers']} workers in all; {where}; torch {torch}"
    )


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people: rounded, with units, and a reason where there is no speed."""

    def interval(row, key, digits):
        if pd.isna(row[key]):
            return ""
        low, high = row[f"{key}_low"], row[f"{key}_high"]
        return f"{row[key]:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"

    def number(value, text):
        return "" if pd.isna(value) else text.format(value)

    rows = []
    for _, row in frame.iterrows():
        rows.append(
            {
                "case": row["case"],
                "world size": row["world"],
                "local batch": row["local_batch"],
                "images/s [95%]": interval(row, "images_per_second", 0)
                if row["status"] == "ok"
                else row["status"],
                "against snsc.py [95%]": interval(row, "ratio", 3),
                "verdict": "" if pd.isna(row["verdict"]) else row["verdict"],
                "waiting for data": number(row["data_share"], "{:.1%}"),
                "start-up s": number(row["startup_seconds"], "{:.1f}"),
                "peak MiB": number(row["memory_mib"], "{:,.0f}"),
                "off the oracle": "0"
                if row["distance"] == 0
                else number(row["distance"], "{:.0e}"),
            }
        )
    return pd.DataFrame(rows)


def notes(known: list[dict], frame: pd.DataFrame, warning: str | None) -> list[str]:
    """What a reader must know beside the numbers."""
    rounds = int(frame["rounds"].max()) if frame["rounds"].notna().any() else 0
    stops = records.of(known, "stop")
    why = f": {stops[-1]['reason']}" if stops else ": the run was cut short"
    lines = [f"{rounds} round{'s' * (rounds != 1)}{why}."]
    lines[0] += " Intervals over the rounds, ratios paired within a round."
    control = frame[frame["case"] == AGAIN].iloc[0]
    if not pd.isna(control["ratio"]):
        text = f"The control, {AGAIN}: {control['ratio']:.3f} "
        text += f"[{control['ratio_low']:.3f}, {control['ratio_high']:.3f}]"
        noisy = not control["ratio_low"] <= 1 <= control["ratio_high"] and rounds >= 3
        lines.append(text + ("; this machine is too noisy to rank." if noisy else "."))
    if rounds < 3:
        lines.append("With fewer than 3 rounds an interval is the range, and nothing is ranked.")
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

    Raises records.BadRecords.
    """
    known, warning = records.read(folder)
    frame = tidy(known)
    heading, people, remarks = title(known), shown(frame), notes(known, frame, warning)
    text = f"**{heading}**\n\n{markdown(people)}\n" + "".join(f"- {line}\n" for line in remarks)
    replace(folder / "table.md", text)
    replace(folder / "table.csv", frame.to_csv(index=False))
    return heading, people, remarks


def replace(path: Path, text: str) -> None:
    """Writes a file whole, or leaves it as it was."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
