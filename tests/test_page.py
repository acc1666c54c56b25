"""report.html as a file, without a browser: old, hostile, large and missing records."""

import json
import shutil

import pytest
from support import ROOT

from bench import records
from bench.show import report

OLD = sorted((ROOT / "logs").glob("*/*/records.jsonl"))


def test_what_records_say_is_text_never_markup(tmp_path):
    """Records may come from another's machine."""
    evil = "</script><script>alert(1)</script>"
    lines = [json.loads(line) for line in OLD[0].read_text().splitlines()]
    lines[0]["environment"] |= {"cpu": evil, "topology": f"{evil}\nGPU0"}
    next(line for line in lines if line["kind"] == "skip")["reason"] = evil
    (tmp_path / records.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report.write(tmp_path).read_text()
    assert "alert(1)" in text and "<script>alert" not in text


def test_records_too_large_to_carry_are_left_out_in_words(tmp_path, monkeypatch):
    """The page says how large the file is, and where it lies."""
    shutil.copy(OLD[0], tmp_path)
    monkeypatch.setattr(report, "CARRIED", 100)
    text = report.write(tmp_path).read_text()
    assert "data-file" not in text.split("<script>")[0]
    assert (
        f"too large to be carried in this page: it lies in the folder <code>{tmp_path.name}" in text
    )


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.parent.name)
def test_old_records_still_give_a_page(path, tmp_path):
    """Those in logs/, whatever version of the harness wrote them."""
    shutil.copy(path, tmp_path)
    text = report.write(tmp_path).read_text()
    assert '<figure id="plot-throughput">' in text and 'class="lead"' in text


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path):
    """An empty folder has no records; what was there stays."""
    (tmp_path / report.NAME).write_text("old")
    with pytest.raises(records.BadRecords):
        report.write(tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(report.NAME, "old")]
