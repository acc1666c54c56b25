"""docs/learn/: its pictures, and what the trace behind one of them holds."""

import json

import pytest

from bench.experiments import effects
from docs.make import pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_would_be_drawn(name):
    text = (pictures.FOLDER / f"{name}.svg").read_text()
    assert pictures.words(text) == pictures.words(pictures.drawn(name))
    assert "prefers-color-scheme: dark" in text


def test_other_words_are_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "PICTURES", {"zero": pictures.zero})
    (tmp_path / "zero.svg").write_text(pictures.drawn("zero").replace("ZeRO-1", "ZeRO-9"))
    (found,) = pictures.stale(tmp_path).items()
    assert found == (tmp_path / "zero.svg", pictures.drawn("zero"))


@pytest.mark.full
def test_a_step_is_traced(tmp_path, monkeypatch):
    """DDP's all-reduces begin before backward ends; each phase lies in the step."""
    whole = effects.step()
    monkeypatch.setattr(effects, "EFFECTS", {"step": lambda: whole._replace(jobs=whole.jobs[:1])})
    assert effects.main(["--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    traces = [line for line in lines if line["event"] == "trace"]
    assert [trace["traced_rank"] for trace in traces] == [0, 1]
    for trace in traces:
        spans = trace["spans"]
        order = ["forward", "backward", "step"]
        phases = {kind: (begin, end) for kind, begin, end in spans if kind in order}
        assert sorted(phases, key=phases.get) == order
        sent = [begin for kind, begin, _ in spans if kind == "all_reduce"]
        begin, end = phases["backward"]
        assert len(sent) >= 2 and begin < min(sent) < end
