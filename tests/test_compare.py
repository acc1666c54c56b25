"""compare: what got slower is found, what did not is left in peace."""

import json

import numpy as np
import pytest
from made_up import simulated
from scipy.stats import binom

from bench import records
from bench.__main__ import main
from bench.cases import AGAIN, PLAIN
from bench.show.compare import change
from bench.stats import UNCLEAR, difference

RATES = {PLAIN: 1000, AGAIN: 1000, "case": 900}


def saved(folder, rates: dict, seed, blocks: int = 10, plan=None, **environment):
    """A folder with such a run."""
    known = simulated(rates, blocks, seed)
    known[0]["environment"] |= environment
    known[0]["plan"] |= plan or {}
    folder.mkdir()
    (folder / records.NAME).write_text("".join(json.dumps(r) + "\n" for r in known))
    return str(folder)


def test_two_equal_runs_agree(tmp_path, capsys):
    """In other hours of the machine: no regression, nothing faster."""
    old, new = (saved(tmp_path / name, RATES, name) for name in ("old", "new"))
    assert main(["compare", old, new]) == 0
    said = capsys.readouterr().out
    assert said.count("no clear difference") == 2 and "baseline" in said
    assert "the environments and the settings are the same" in said


def test_of_20_pairs_of_equal_runs_one_may_show_a_change():
    """200 pairs of five cases each: no more of them than chance allows where one in 20 may."""
    dice, false = np.random.default_rng(0), 0
    for _ in range(200):
        runs = dice.normal(0, 0.06, (2, 5, 10))
        found = {difference(change(*pair, 5), 0.05) for pair in zip(*runs, strict=True)}
        false += found != {UNCLEAR}
    assert 0 < false <= binom.ppf(0.999, 200, 0.05)


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
    old = saved(tmp_path / "old", RATES, 1, blocks=20)
    new = saved(tmp_path / "new", {name: rate / 2 for name, rate in RATES.items()}, 2, blocks=20)
    assert main(["compare", old, new]) == 0
    assert main(["compare", old, new, "--absolute"]) == 1
    assert PLAIN in capsys.readouterr().err


def test_a_case_without_a_speed_any_more_is_a_regression(tmp_path, capsys):
    """Where the new run was to measure it; with too few blocks nothing is claimed."""
    old = saved(tmp_path / "old", RATES, 1)
    new = saved(tmp_path / "new", RATES, 2)
    path = tmp_path / "new" / records.NAME
    lines = path.read_text().splitlines()
    kept = [line for line in lines if '"sample"' not in line or '"case": "case"' not in line]
    failure = json.dumps({"kind": "failure", "case": "case", "block": 1, "reason": "crashed"})
    path.write_text("\n".join([*kept, failure, ""]))
    assert main(["compare", old, new]) == 1
    assert "slower or lost: case" in capsys.readouterr().err
    skip = json.dumps({"kind": "skip", "case": "case", "reason": "srun not found"})
    path.write_text("\n".join([*kept, skip, ""]))
    for other in (new, saved(tmp_path / "unplanned", {PLAIN: 1000, AGAIN: 1000}, 2)):
        assert main(["compare", old, other]) == 0
        assert "only in the old one" in capsys.readouterr().out
    few = saved(tmp_path / "few", RATES | {"case": 100}, 3, blocks=5)
    assert main(["compare", old, few]) == 0
    assert "nothing claimed" in capsys.readouterr().out


def test_runs_of_other_plans_are_refused_unless_told(tmp_path, capsys):
    """A smaller batch is no regression; another budget or order is no other plan."""
    old = saved(tmp_path / "old", RATES, 1)
    new = saved(tmp_path / "new", RATES, 2, plan={"batch_size": 64, "budget": 9, "seed": 3})
    with pytest.raises(SystemExit) as ended:
        main(["compare", old, new])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert "batch_size: 256 -> 64" in said and "--anyway" in said and "budget" not in said
    assert main(["compare", old, new, "--anyway"]) == 0
    assert "batch_size: 256 -> 64" in capsys.readouterr().out


def test_a_noisy_control_forbids_claims(tmp_path, capsys):
    """As in the table."""
    old = saved(tmp_path / "old", RATES, 1)
    new = saved(tmp_path / "new", RATES | {AGAIN: 1500, "case": 500}, 2)
    assert main(["compare", old, new]) == 0
    said = capsys.readouterr().out
    assert "nothing claimed" in said and "slower" not in said


def test_a_broken_line_is_said_and_the_rest_is_read(tmp_path, capsys):
    whole, broken = saved(tmp_path / "whole", RATES, 1), saved(tmp_path / "broken", RATES, 1)
    path = tmp_path / "broken" / records.NAME
    lines = path.read_text().splitlines()
    lines[9] = lines[9][:40]
    path.write_text("\n".join([*lines, ""]))
    known, warning = records.read(tmp_path / "broken")
    assert len(known) == len(lines) - 1 and "line 10 is broken" in warning
    assert main(["compare", whole, broken]) == 0
    assert "line 10 is broken" in "".join(capsys.readouterr())
