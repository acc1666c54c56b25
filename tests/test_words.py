"""What a run's numbers say in words: nothing that a row does not claim."""

import pytest

from bench.cases import AGAIN, PLAIN
from bench.show import words
from bench.show.summary import COLUMNS


def row(name: str, ratio=None, claim=None, **more) -> dict:
    """A row of by_case, with its interval 2% to both sides."""
    found = dict.fromkeys(COLUMNS) | {"case": name, "script": name, "status": "ok", "share": 1}
    found |= {"devices": 1, "blocks": 20, "ratio": ratio, "claim": claim}
    if ratio:
        found |= {"ratio_low": 0.98 * ratio, "ratio_high": 1.02 * ratio}
    return found | more


REFERENCE, CONTROL = row(PLAIN), row(AGAIN, 1.001)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            [row("a", 0.9, "slower"), row("b", 0.5, "slower"), row("c", 1.3, "faster")],
            "Slower than snsc.py: b by 50% and a by 10%; faster: c by 30%.",
        ),
        (
            [row("a", 1.3, "faster"), row("b", 1.0, "no clear difference")],
            "Faster than snsc.py: a by 30%; no clear difference: 1 case.",
        ),
        (
            [row("a", 0.99, "no clear difference"), row("b", 1.0, "no clear difference")],
            "No clear difference from snsc.py: 2 cases.",
        ),
        (
            [row("a", 0.7, "slower"), row("b", 0.8, "nothing claimed")],
            "Slower than snsc.py: a by 30%; nothing claimed: 1 case.",
        ),
        ([row(f"c{k}", 0.5 + k / 20, "slower") for k in range(6)], None),
    ],
)
def test_claims_are_said_the_largest_first(rows, text):
    """And of many only the first are named."""
    said = words.sentence([REFERENCE, CONTROL, *rows])
    text = text or "Slower than snsc.py: c0 by 50%, c1 by 45%, c2 by 40% and 3 more."
    control = "The control, a repeat of snsc.py, has the ratio 1.001 [0.981, 1.021]: "
    control += "the interval includes 1."
    assert said == f"{text} {control}"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row("a", 0.5, "nothing claimed", blocks=2, ratio_low=None)], "2 blocks, and a claim"),
        ([row("a", 0.5, "nothing claimed")], "the repeat of snsc.py deviates by more than 2%"),
    ],
)
def test_where_nothing_is_claimed_it_is_said_why(rows, why):
    """The ratios are shown all the same, and not called slower."""
    few = "2 blocks" in why
    control = row(AGAIN, 1.1, ratio_low=None) if few else row(AGAIN, 1.1)
    plain = row(PLAIN, blocks=2 if few else 20)
    said = words.sentence([plain, control | {"blocks": plain["blocks"]}, *rows])
    assert "Nothing is claimed: " in said and why in said
    assert "Ratios to snsc.py: 0.50 (a)." in said and "slower" not in said
    assert few or "excludes 1" in said


def test_ddp_is_a_reference_of_its_own():
    """The techniques are about it."""
    more = {"ddp_ratio": 1.2, "ddp_ratio_low": 1.1, "ddp_ratio_high": 1.3, "ddp_claim": "faster"}
    said = words.sentence([REFERENCE, CONTROL, row("bf16 x2", 1.0, "no clear difference", **more)])
    assert "Faster than mnmc_ddp_launch.py with as many processes: bf16 x2 by 20%." in said


def test_a_case_that_trains_wrong_numbers_is_named_on_top():
    """Those that are only skipped are not: they have a line of their own."""
    gone = [row("a", status="failed the gate: wrong numbers"), row("b", status="failed: exit 1")]
    gone.append(row("c", status="skipped: not installed"))
    said = words.sentence([REFERENCE, CONTROL, *gone])
    assert said.endswith("Not measured: a did not pass the gate; b failed.")


def test_a_run_that_can_tell_little_says_so_first():
    """The farther end of the control's interval; otherwise nothing is said."""
    for low, high in ((0.89, 1.12), (0.88, 1.05)):
        wide = row(AGAIN, 1.0, ratio_low=low, ratio_high=high)
        said = words.sentence([REFERENCE, wide])
        assert said.startswith("A noisy run: the control's interval reaches 12% away from 1. ")
    assert "noisy" not in words.sentence([REFERENCE, CONTROL])


def test_what_several_devices_bring():
    """The least and the most of the cases with the most devices; no claim."""
    two = [row("a x2", 1.7, devices=2), row("b x2", 1.9, devices=2), row("c x1", 0.9)]
    text = "On 2 devices, the cases reach 1.70 (a x2) to 1.90 times (b x2) the speed of snsc.py."
    assert text in words.sentence([REFERENCE, CONTROL, *two])
    text = "On 2 devices, a x2 reaches 1.70 times the speed of snsc.py."
    assert text in words.sentence([REFERENCE, CONTROL, two[0]])
    assert "devices" not in words.sentence([REFERENCE, CONTROL, two[-1]])
