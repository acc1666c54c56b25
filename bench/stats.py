"""Rounds, paired ratios and their intervals.

In a round every case is launched once, in random order, so a slow minute hits all cases of the
round alike; the ratio within a round cancels it. The estimate is the median of the rounds'
log-ratios, its 95% interval the percentile bootstrap over rounds (Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, chapter 13).
"""

import numpy as np

RESAMPLES = 10_000


def throughput(windows: list[dict]) -> float:
    """Images/s of a launch: all its images over all its seconds, never a mean of rates.

    windows: the train records after the warm-up; seconds are the slowest process's.
    """
    return sum(w["images"] for w in windows) / sum(w["seconds"] for w in windows)


def median_interval(values, seed: int = 0) -> tuple[float, float, float]:
    """The median and its 95% bootstrap interval; with fewer than 3 values, their range."""
    values = np.asarray(values, dtype=float)
    if len(values) < 3:
        return float(np.median(values)), float(values.min()), float(values.max())
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def ratio_interval(case: dict[int, float], reference: dict[int, float]) -> tuple | None:
    """The ratio case / reference, paired by round: median, low, high; None without a pair.

    Both map a round's number to images/s.
    """
    rounds = sorted(case.keys() & reference.keys())
    if not rounds:
        return None
    logs = [np.log(case[k] / reference[k]) for k in rounds]
    return tuple(float(np.exp(x)) for x in median_interval(logs))


def verdict(ratio: tuple | None, control: tuple | None, rounds: int) -> str:
    """In a word what a ratio to the reference allows to claim.

    control: the ratio of the reference run twice. A difference is claimed only where the interval
    excludes 1 and the effect is beyond 2% and beyond the control's farther limit.
    """
    if ratio is None or control is None:
        return ""
    if rounds < 3:
        return "too few rounds"
    if not control[1] <= 1 <= control[2]:
        return "too noisy"
    least = max(np.log(1.02), abs(np.log(control[1])), abs(np.log(control[2])))
    if ratio[1] <= 1 <= ratio[2] or abs(np.log(ratio[0])) <= least:
        return "tie"
    return "faster" if ratio[0] > 1 else "slower"
