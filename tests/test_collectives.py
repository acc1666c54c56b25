"""techniques/collectives.py: what it prints is what each collective does."""

import re

import pytest
from support import ROOT, succeeded, world

SCRIPT = "techniques/collectives.py"


def shown(out: str) -> dict[str, list[tuple]]:
    """For each collective, what each rank has before and after."""
    found = {}
    for line in out.splitlines():
        if head := re.match(r"(\w+): [A-Z].*\.", line):
            found[head[1]] = []
        elif line:
            rank, before, after = re.fullmatch(r"    rank (\d)  (.*?)->(.*)", line).groups()
            rows = [*found.values()][-1]
            assert int(rank) == len(rows)
            rows.append((before.split(), after.split()))
    return found


def expected(size: int) -> dict[str, list[tuple]]:
    """The same in Python's lists."""
    ranks = range(size)
    own = [[10 * r + place for place in ranks] for r in ranks]
    total = [sum(column) for column in zip(*own, strict=True)]
    firsts, room = [row[0] for row in own], ["."] * size
    wanted = {
        "broadcast": [(own[0] if r == 0 else room, own[0]) for r in ranks],
        "scatter": [(own[0] if r == 0 else [], [own[0][r]]) for r in ranks],
        "gather": [([firsts[r]], firsts if r == 0 else []) for r in ranks],
        "all_gather": [([firsts[r]], firsts) for r in ranks],
        "reduce": [(own[r], total if r == 0 else []) for r in ranks],
        "all_reduce": [(own[r], total) for r in ranks],
        "reduce_scatter": [(own[r], [total[r]]) for r in ranks],
        "all_to_all": [(own[r], [own[other][r] for other in ranks]) for r in ranks],
        "send_and_receive": [(own[r], own[r - 1]) for r in ranks],
    }
    return {
        name: [tuple([str(number) for number in row] for row in pair) for pair in rows]
        for name, rows in wanted.items()
    }


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_before_and_after(size):
    first, *others = world(size, SCRIPT, "--device", "cpu")
    succeeded(first, *others)
    assert not any(run.out for run in others)  # rank 0 prints for all
    found = shown(first.out)
    assert len(found.pop("barrier")) == size
    assert [*found] == [*expected(size)] and found == expected(size)
    if size == 3:  # its page shows the same
        page = (ROOT / "docs" / "diffs" / "collectives.md").read_text().splitlines()
        said = [line.rstrip() for line in first.out.splitlines() if "waited" not in line]
        assert set(said) <= set(page)


def test_a_single_rank_has_no_other_to_send_to():
    (only,) = world(1, SCRIPT, "--device", "cpu")
    succeeded(only)
    assert shown(only.out)["send_and_receive"] == [([], [])]
    assert shown(only.out)["all_reduce"] == [(["0"], ["0"])]
