"""mistakes audited: what audit.py finds of the mistakes in docs/diffs/, and how that is judged."""

import json
from types import SimpleNamespace

import psutil
import pytest
from support import ROOT, full, wait_until

import audit
from bench import UserError
from docs.make import audited as tables
from mistakes import audited, found, ranks
from mistakes.found import CAUSE, CONSEQUENCE, HINTED, MISSED, NOT_RUN, judged
from mistakes.outcomes import FOLDER, measured, read, render
from mistakes.page import parse
from mistakes.trials import Trial

LAUNCH = "mnmc_ddp_launch"


def finding(level: str, kind: str, step: int | None = None) -> dict:
    return {"level": level, "kind": kind, "line": "a.py:1", "text": "", "step": step}


def record(*findings: dict, piece: str = "order", outcome: str = "silent", **more) -> dict:
    """A made-up record of a piece of mnmc_ddp_launch."""
    about = {"page": LAUNCH, "piece": piece, "outcome": outcome, "audit": "a", "code": "c"}
    about |= {"torch": "2.15", "cpu": "a CPU", "cores": 2}
    return about | {"findings": [*findings], "unchecked": []} | more


RIGHT, OTHER = finding("ERROR", "one order", 5), finding("WARN", "no shuffling")


@pytest.mark.parametrize(
    ("findings", "named", "verdict"),
    [
        ([OTHER, RIGHT], ["one order"], CAUSE),
        ([finding("HINT", "one order")], ["one order"], HINTED),
        ([finding("HINT", "one order"), OTHER], ["one order"], HINTED),
        ([OTHER], ["one order"], CONSEQUENCE),
        ([RIGHT], "needs a reference", CONSEQUENCE),
        ([finding("HINT", "no shuffling")], ["one order"], MISSED),
        ([], "needs a reference", MISSED),
    ],
)
def test_a_finding_is_judged_by_its_kind_and_level(findings, named, verdict):
    assert judged(record(*findings), named) == verdict


def test_what_did_not_run_is_not_missed():
    assert judged({"reason": "no GPU"}, ["one order"]) == NOT_RUN
    assert found.reason({"reason": "no GPU"}) == "no GPU"
    assert judged({"reason": "killed", "exit": -9}, ["one order"]) == MISSED


def test_each_silent_mistake_has_its_causes():
    """These are kinds of audit.py's, or say why no kind can name it; and nothing else has any."""
    kinds = {*audit.KINDS}
    listed = {name: page for name, page in found.causes().items() if name != "missed"}
    silent = {
        page: {name for name, outcome in known.items() if outcome["kind"] == "silent"}
        for page, known in read(FOLDER).items()
    }
    assert {page: {*pieces} for page, pieces in listed.items()} == {
        k: v for k, v in silent.items() if v
    }
    for named in (named for pieces in listed.values() for named in pieces.values()):
        assert (
            {*named} <= kinds
            if isinstance(named, list)
            else named.startswith("needs a reference: ")
        )


def test_all_records_are_of_mistakes_that_there_are_and_each_miss_has_a_reason():
    for (page, piece), line in found.known().items():
        if page:
            assert piece in measured(parse(FOLDER / f"{page}.md"))
            missed = judged(line, found.cause(line)) not in (CAUSE, HINTED)
            assert not missed or line["outcome"] != "silent" or found.reason(line), (page, piece)


def test_the_readme_says_how_many_are_named():
    assert f"[{tables.named()}](docs/evidence/audit.md)" in (ROOT / "README.md").read_text()


def test_the_example_is_that_of_the_log():
    page = (ROOT / "docs" / "howto" / "audit.md").read_text()
    log = json.loads((ROOT / "logs/2-cores-xeon-torch2.15/audit-example.json").read_text())
    head = "audit of {script}: {ranks} ranks, {steps} steps, {seconds:.0f} seconds\n".format(**log)
    assert head in page and len(log["findings"]) == 2
    for finding in log["findings"]:
        assert "{level}  {line}: {what}\n  seen: {seen}\n  cure: {cure}\n".format(**finding) in page


def test_a_page_says_what_the_audit_finds(monkeypatch):
    """Only where the record is of the code that the outcome is of."""
    page, known = parse(FOLDER / f"{LAUNCH}.md"), read(FOLDER)[LAUNCH]

    def shown(line: dict, code: str = known["order"]["code"]) -> str:
        monkeypatch.setattr(found, "known", lambda: {(LAUNCH, "order"): line | {"code": code}})
        block = render(page, known).split("<!-- piece order: ")[1].split("```diff")[0]
        return block.partition("instead of 1.9281.")[2].strip()

    assert shown(record(RIGHT, OTHER)) == "`audit.py` reports *one order*."
    assert shown(record(OTHER)) == "`audit.py` reports *no shuffling*, a consequence."
    assert shown(record()) == "`audit.py` does not find it."
    assert shown(record(reason="no GPU")) == shown(record(RIGHT), "other") == ""


def test_the_tables_count_what_the_records_say(monkeypatch, tmp_path):
    """Records of an older audit.py do not count."""
    outcomes = {LAUNCH: {name: {"kind": "silent"} for name in ("order", "draws", "batch")}}
    outcomes[LAUNCH] |= {"save": {"kind": "hang"}, "seed": {"kind": "no effect here"}}
    monkeypatch.setattr(tables, "read", lambda folder: outcomes)
    right = {"page": "", "outcome": "right"}
    monkeypatch.setattr(tables, "link", lambda path: "log")
    lines = [
        record(RIGHT, piece="batch", audit="older"),
        record(RIGHT),
        record(OTHER, piece="draws"),
        record(finding("HINT", "group left"), piece="snsc.py", **right),
        record(OTHER, piece="other.py", **right),
        record(finding("ERROR", "hang", 1), piece="save", outcome="hang"),
    ]
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = " ".join(" ".join(tables.summary(path)).split())
    assert "names the cause of 1 of 3 silent mistakes (33%); 0 of these findings" in text
    assert "1 mistakes could not run here. Of those that ran, it names 1 of 2 (50%)." in text
    assert "in 1 of 2 right programs: other.py (no shuffling)." in text
    (by_page,) = tables.counts(path, "page")
    assert [*by_page.values[0][1:]] == ["3", "1", "", "1", "", "1", "5"]
    (by_outcome,) = tables.counts(path, "outcome")
    assert [*by_outcome.values[2]] == ["hang", "1", "1", "", "", "", "", "1"]
    (missed,) = tables.misses(path)
    assert [row[2] for row in missed.values] == ["no shuffling", ""]
    assert [row[3] for row in missed.values][1] == "not yet run"


def test_a_run_has_a_trials_own_flags_but_those_for_the_oracle():
    trial = Trial("techniques/comm_hooks.py", "", flags=("--images", "9", "9", "--arch", "x"))
    trial = SimpleNamespace(script="a.py", flags=trial.flags, own=("--hook", "own"), save=False)
    assert audited.flags(trial)[-4:] == ["--arch", "x", "--hook", "own"]
    assert "--images" not in audited.flags(trial) and "9" not in audited.flags(trial)


def test_right_programs_are_all_of_them():
    names = {what["piece"] for what, _ in audited.right()}
    assert {"snsc.py", "imagenet.py", "techniques/zero1.py", "tests/programs/gan.py"} <= names


def test_what_cannot_run_has_a_reason():
    assert audited.audited(Trial("techniques/oneflow_ddp.py", ""), [], ROOT)["reason"]


@pytest.mark.parametrize("pieces", full({"sums", "test"}))
def test_two_mistakes_are_run_and_not_again(pieces, tmp_path, monkeypatch):
    jobs = [job for job in audited.mistakes([LAUNCH]) if job[0]["piece"] in pieces]
    monkeypatch.setattr(audited, "mistakes", lambda names: jobs)
    monkeypatch.setattr(audited, "show", lambda names: None)
    path = tmp_path / "audit.jsonl"
    assert audited.main(["--out", str(path), LAUNCH]) == 0
    first = path.read_text()
    verdicts = {r["piece"]: judged(r, found.cause(r)) for r in found.latest(path).values()}
    assert verdicts == dict.fromkeys(pieces, CAUSE)
    monkeypatch.setattr(audited, "audited", None)  # would be called
    assert audited.main(["--out", str(path), LAUNCH]) == 0 and path.read_text() == first


@pytest.mark.parametrize("words", [[LAUNCH], ["--silent"]])
def test_a_part_does_not_replace_all_records_of_another_audit(words, tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text(text := json.dumps(record(RIGHT)) + "\n")
    with pytest.raises(UserError, match="of another audit"):
        audited.main(["--out", str(path), *words])
    assert path.read_text() == text


@pytest.mark.parametrize("limit", full(4.0))
def test_ranks_end_with_their_limit(limit, tmp_path):
    """With what they have started."""
    text = "import os, subprocess, time\nprint(os.environ['WORLD_SIZE'], flush=True)\n"
    text += "print(subprocess.Popen(['sleep', '99']).pid, flush=True)\ntime.sleep(99)\n"
    (tmp_path / "a.py").write_text(text)
    done = ranks.run(2, ["a.py"], limit, tmp_path)
    size, child = done.out.split()
    assert done.timed_out and size == "2"
    wait_until(lambda: not psutil.pid_exists(int(child)), 20)
