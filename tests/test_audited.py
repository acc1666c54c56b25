"""mistakes audited: what audit.py finds of the mistakes in docs/diffs/, and how that is judged."""

import json
from collections import Counter

import pytest
from support import ROOT

import audit
from bench import UserError
from docs.make import audited as tables
from docs.make.audited import faulty
from mistakes import audited, found
from mistakes.found import CAUSE, CONSEQUENCE, HINTED, MISSED, NOT_RUN, judged
from mistakes.outcomes import FOLDER, measured, read
from mistakes.page import parse

LAUNCH = "mnmc_ddp_launch"
LOGS = ROOT / "logs" / "2-cores-xeon-torch2.15"


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


def test_the_page_says_how_far_a_second_judge_agrees():
    """On the first kind that names a mistake, or that none does; by Cohen's formula of 1960."""
    judge = json.loads((LOGS / "audit-judge.json").read_text())
    pairs = []
    for name, opinion in judge.items():
        page, piece = name.split(".")
        ours = found.causes()[page][piece]
        pairs.append(((opinion["kinds"] or [""])[0], ours[0] if isinstance(ours, list) else ""))
    both, (one, two) = sum(a == b for a, b in pairs), map(Counter, zip(*pairs, strict=True))
    share, chance = both / len(pairs), sum(one[k] * two[k] for k in one) / len(pairs) ** 2
    said = f"both agree for {both} of {len(pairs)} (Cohen's kappa: "
    said += f"{(share - chance) / (1 - chance):.2f})"
    assert said in (ROOT / "docs/evidence/audit.md").read_text()


def test_the_readmes_say_how_many_scripts_of_others_have_errors():
    lines = [json.loads(line) for line in (LOGS / "audit-others.jsonl").read_text().splitlines()]
    wrong, ran = faulty(lines)
    assert f"[{wrong} of {ran} published scripts]" in (ROOT / "README.md").read_text()
    assert f"[{ran} 个已发布的脚本中的 {wrong} 个]" in (ROOT / "README.zh-CN.md").read_text()


def test_the_example_is_that_of_the_log():
    page = (ROOT / "docs" / "howto" / "audit.md").read_text()
    log = json.loads((ROOT / "logs/2-cores-xeon-torch2.15/audit-example.json").read_text())
    head = "audit of {script}: {ranks} ranks, {steps} steps, {seconds:.0f} seconds\n".format(**log)
    assert head in page and len(log["findings"]) == 2
    for finding in log["findings"]:
        assert "{level}  {line}: {what}\n  seen: {seen}\n  cure: {cure}\n".format(**finding) in page


def test_right_programs_are_all_of_them():
    names = {what["piece"] for what, _ in audited.right()}
    assert {"snsc.py", "imagenet.py", "techniques/zero1.py", "tests/programs/gan.py"} <= names


@pytest.mark.full
def test_two_mistakes_are_run_and_not_again(tmp_path, monkeypatch):
    pieces = {"sums", "sampler"}
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


def test_a_part_does_not_replace_all_records_of_another_audit(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text(text := json.dumps(record(RIGHT)) + "\n")
    with pytest.raises(UserError, match="of another audit"):
        audited.main(["--out", str(path), LAUNCH])
    assert path.read_text() == text
