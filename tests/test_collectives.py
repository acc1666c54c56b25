"""techniques/collectives.py: what it draws is what each collective does."""

import re

import pytest
from support import ROOT, forked, refused, succeeded, world

SCRIPT = "techniques/collectives.py"


def drawn(out: str) -> dict[str, list[tuple]]:
    """Of each example, what each process has before and after."""
    found = {}
    for line in out.splitlines():
        if head := re.match(r"(\w+): [A-Z].*\.", line):
            found[head[1]] = []
        elif line:
            rank, before, after = re.fullmatch(r"    process (\d)  (.*?)->(.*)", line).groups()
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_who_has_what_before_and_after(size):
    first, *others = world(size, SCRIPT, "--device", "cpu")
    succeeded(first, *others)
    assert not any(run.out for run in others)  # process 0 draws for all
    found = drawn(first.out)
    barrier = found.pop("barrier")
    assert [*found] == [*expected(size)] and found == expected(size)
    seconds = [float(after[1]) for before, after in barrier]
    assert seconds[0] < min(seconds[1:])  # it came last, and the others waited
    if size == 3:  # its page shows the same
        page = (ROOT / "docs" / "ladder" / "collectives.md").read_text().splitlines()
        said = [line.rstrip() for line in first.out.splitlines() if "waited" not in line]
        assert set(said) <= set(page)


def test_alone_there_is_nobody_to_send_to():
    (only,) = world(1, SCRIPT, "--device", "cpu")
    succeeded(only)
    assert drawn(only.out)["send_and_receive"] == [([], [])]
    assert drawn(only.out)["all_reduce"] == [(["0"], ["0"])]


def test_help_names_its_start_and_its_flag():
    done = forked(SCRIPT, "--help", COLUMNS=100)
    succeeded(done)
    assert f"torchrun --standalone --nproc-per-node 4 {SCRIPT}" in done.out
    assert "--device" in done.out and max(map(len, done.out.splitlines())) <= 100


def test_too_many_to_draw():
    """Before any of them waits for the others."""
    env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 10, "LOCAL_WORLD_SIZE": 10}
    refused(forked(SCRIPT, **env), "WORLD_SIZE", "9")
