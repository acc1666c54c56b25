"""Computes paired ratios and their intervals from blocks, and what they allow to claim.

In a block every case is started afresh, in random order, and the cases take turns; a slow minute of
the machine hits all of them alike, and the ratio within a turn cancels it. Some of what a process
costs is decided by its start (where its memory lies, on which cores it runs), so the turns of one
start are not independent: a block gives one number, the mean of its turns' log-ratios, and
intervals are Student's t on the blocks alone (Kalibera and Jones, Rigorous benchmarking in
reasonable time, 2013; its corrected estimators, kar.kent.ac.uk/33611).

Below, `logs` are log-ratios by turn, a series with the index (block, round); `values` are the means
of their blocks.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import nctdtrinc, stdtrit

LEVEL = 0.95  # of all claims of a table together
LEAST = 0.02  # a smaller effect is not claimed, however narrow its interval
FEWEST = 6  # blocks for a claim or an interval: with 5 and ten claims, t's factor is 5.6
FOUND = 0.9  # the share of runs that the smallest difference is to be found in

NOTHING, UNCLEAR = "nothing claimed", "no clear difference"


def block_means(logs):
    """A number a block: the mean of its turns; without the turns that are missing (NaN)."""
    return logs.dropna().groupby(level="block").mean()


def factor(blocks: int, claims: int = 1) -> float:
    """How many standard errors a confidence interval's half-width has: Student's t.

    Each of so many claims gets its share of 5% (Bonferroni), so that all hold together at LEVEL;
    else of 20 equal cases one would be called faster or slower.
    """
    return float(stdtrit(blocks - 1, 1 - (1 - LEVEL) / 2 / max(1, claims)))


def interval(
    values: Sequence[float], claims: int = 1
) -> tuple[float, float | None, float | None] | None:
    """The ratio (geometric mean over blocks) and the ends of its interval; None without a block.

    With fewer than FEWEST blocks the ends are None: they would be too wide to mean anything.
    """
    if not len(values):
        return None
    middle = float(np.mean(values))
    if len(values) < FEWEST:
        return math.exp(middle), None, None
    reach = factor(len(values), claims) * standard_error(values)
    return tuple(math.exp(x) for x in (middle, middle - reach, middle + reach))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of the blocks' numbers."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def spreads(logs) -> tuple[float | None, float | None]:
    """Standard deviations between starts and between turns of one start; None where none is known.

    Kalibera and Jones's T2 and T1: the variance of the blocks' means holds that of the turns,
    divided by their number (the harmonic mean of it), which is taken off.
    """
    blocks = logs.dropna().groupby(level="block")
    turns = blocks.size()
    if turns.max() == 1:
        return None, None
    within = float((blocks.var() * (turns - 1)).sum() / (turns - 1).sum())
    if len(turns) == 1:
        return None, math.sqrt(within)
    between = float(blocks.mean().var() - within * (1 / turns).mean())
    return math.sqrt(max(0.0, between)), math.sqrt(within)


def too_noisy(control: tuple | None) -> bool:
    """Whether two equal cases seem to differ: the control's nearer limit is beyond LEAST."""
    if control is None or control[1] is None:
        return False
    return control[1] > 1 + LEAST or control[2] < 1 / (1 + LEAST)


def claim(ratio: tuple | None, control: tuple | None) -> str | None:
    """What a ratio of a table allows to claim, None without a ratio: nothing where the control is
    missing or too noisy, else a `difference`. Both with the ends of their intervals at the joint
    level.
    """
    if ratio is None:
        return None
    if control is None or control[1] is None or too_noisy(control):
        return NOTHING
    return difference(ratio)


def difference(ratio: tuple, least: float = LEAST) -> str:
    """What a ratio with the ends of its interval says: "faster", "slower", UNCLEAR or NOTHING.

    A difference is claimed where the interval excludes 1 and the effect is beyond `least`; nothing
    is without an interval, as with fewer than FEWEST blocks.
    """
    if ratio[1] is None:
        return NOTHING
    if ratio[1] <= 1 <= ratio[2] or abs(math.log(ratio[0])) <= math.log1p(least):
        return UNCLEAR
    return "faster" if ratio[0] > 1 else "slower"


def smallest(values: Sequence[float], claims: int) -> float | None:
    """The smallest slow-down, as a share, that FOUND of such runs would claim; None where none can.

    By the noncentral t distribution, with the spread of these blocks taken for the true one.
    """
    if len(values) < FEWEST:
        return None
    away = float(nctdtrinc(len(values) - 1, 1 - FOUND, factor(len(values), claims)))
    return max(1 - math.exp(-away * standard_error(values)), LEAST)
