"""table.md and table.csv of a run, from its records alone."""

from pathlib import Path

import pandas as pd

from bench.cases import AGAIN
from bench.results import records
from bench.results.stats import FEWEST
from bench.results.summary import COLUMNS, by_case, title, usable

# What fits on a terminal; table.md has all columns.
NARROW = ["case", "images/s [95%]", "against snsc.py [95%]", "rank", "verdict"]
NARROW += ["waiting for data", "exposed communication", "off the oracle"]


def tidy(known: list[dict]) -> pd.DataFrame:
    """summary.by_case as a frame; what a case does not have is missing."""
    return pd.DataFrame(by_case(known), columns=COLUMNS)


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people: rounded, with units, and a reason where there is no speed."""

    def number(row, key, text):
        return "" if pd.isna(row[key]) else text.format(row[key])

    def interval(row, key, text):
        if pd.isna(row[key]):
            return ""
        if row["rounds"] < 2:  # one number has no interval
            return text.format(row[key])
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
    if bad := records.dropped(samples):
        worst = "; ".join(f"round {k}, {text}" for k, text in list(bad.items())[:3])
        lines.append(
            f"{len(bad)} of {len({s['round'] for s in samples})} rounds are left out for what else "
            f"the machine did ({worst}{'; ...' * (len(bad) > 3)}); table-all.md has them all."
        )
    control = frame[frame["case"] == AGAIN].iloc[0]
    if not pd.isna(control["ratio"]):
        text = f"The control, {AGAIN}: {control['ratio']:.3f}"
        if rounds > 1:
            text += f" [{control['ratio_low']:.3f}, {control['ratio_high']:.3f}]"
        noisy = not control["ratio_low"] <= 1 <= control["ratio_high"] and rounds >= FEWEST
        lines.append(text + ("; this machine is too noisy to rank." if noisy else "."))
    if rounds < FEWEST:
        lines.append(f"With fewer than {FEWEST} rounds nothing is ranked.")
    if frame["rank"].notna().any():
        lines.append(
            "Verdicts hold together, and so do ranks: each by a wider interval than the shown 95%. "
            "Cases of one rank are tied: a rank is 1 and as many as are faster."
        )
    if frame["mfu"].max() < 0.1:
        lines.append(
            "MFU below 10%: a step is mostly starting kernels, and faster arithmetic hardly shows; "
            "raise --batch-size, or take --dataset imagenet."
        )
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
