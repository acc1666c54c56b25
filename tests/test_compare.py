"""compare and merge: what got slower is found, what did not is left in peace."""

import json

import pytest
from simulated import simulated

from bench.__main__ import main
from bench.cases import AGAIN, PLAIN
from bench.results import records

RATES = {PLAIN: 1000, AGAIN: 1000, "case": 900}


def saved(folder, rates: dict, seed: int, rounds: int = 15, **environment):
    """A folder with such a run."""
    known = simulated(rates, rounds, seed)
    known[0]["environment"] |= environment
    folder.mkdir()
    (folder / records.NAME).write_text("".join(json.dumps(r) + "\n" for r in known))
    return str(folder)


def test_two_equal_runs_agree(tmp_path, capsys):
    """20 pairs of runs, in other hours of the machine: no regression, nothing faster."""
    for seed in range(20):
        old = saved(tmp_path / f"old{seed}", RATES, seed)
        new = saved(tmp_path / f"new{seed}", RATES, 100 + seed)
        assert main(["compare", old, new]) == 0
        said = capsys.readouterr().out
        assert "no change" in said and "slower" not in said and "faster" not in said
        assert "the environments and the settings are the same" in said


def test_a_regression_is_named_and_the_exit_code_is_1(tmp_path, capsys):
    """Here of 15%; and what differs in the environment is said."""
    old = saved(tmp_path / "old", RATES, 1)
    new = saved(tmp_path / "new", RATES | {"case": 765}, 2, versions={"torch": "2.16.0"})
    assert main(["compare", old, new]) == 1
    out, err = capsys.readouterr()
    assert err == "bench: slower or lost: case\n"
    assert "versions torch: 2.15.0 -> 2.16.0" in out
    assert main(["compare", new, old]) == 0
    assert "faster" in capsys.readouterr().out
    assert main(["compare", old, new, "--tolerance", "0.3"]) == 0


def test_what_got_slower_with_the_reference_is_seen_by_absolute(tmp_path, capsys):
    """Ratios cannot show it, images/s do."""
    old = saved(tmp_path / "old", RATES, 1, rounds=40)
    new = saved(tmp_path / "new", {name: rate / 2 for name, rate in RATES.items()}, 2, rounds=40)
    assert main(["compare", old, new]) == 0
    assert main(["compare", old, new, "--absolute"]) == 1
    assert PLAIN in capsys.readouterr().err


def test_a_case_without_a_speed_any_more_is_a_regression(tmp_path, capsys):
    """As it would be for its users; with too few rounds nothing is claimed."""
    old = saved(tmp_path / "old", RATES, 1)
    new = saved(tmp_path / "new", {PLAIN: 1000, AGAIN: 1000}, 2)
    assert main(["compare", old, new]) == 1
    assert "slower or lost: case" in capsys.readouterr().err
    few = saved(tmp_path / "few", RATES | {"case": 100}, 3, rounds=2)
    assert main(["compare", old, few]) == 0
    assert "too few rounds" in capsys.readouterr().out


def test_machines_stand_side_by_side(tmp_path, capsys):
    """A row a case, a column a machine; a case that one of them lacks is blank there."""
    one = saved(tmp_path / "one", RATES, 1)
    two = saved(tmp_path / "two", {PLAIN: 100, AGAIN: 100}, 2, cores=64)
    assert main(["merge", one, two, "--out", str(tmp_path / "merged.md")]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "merged.md").read_text().strip() == said.strip()
    head, _, *lines = said.splitlines()
    assert "2 cores of C: images/s [95%]" in head and "64 cores of C: images/s [95%]" in head
    (row,) = [line for line in lines if line.startswith("| case |")]
    assert row.endswith("|  |  |  |") and row.count("[") == 2


@pytest.mark.parametrize("command", [["compare", "/nowhere", "/nowhere"], ["merge", "/nowhere"]])
def test_a_folder_without_a_result_is_one_line(command, capsys):
    """That names it; exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "/nowhere" in said and said.count("\n") == 1
