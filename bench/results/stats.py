"""Rounds, paired ratios and their intervals, and what they allow to claim.

In a round every case is measured once, in random order, so a slow minute hits all cases of the
round alike; the ratio within a round cancels it. The estimate is the median of the rounds'
log-ratios, its 95% interval the percentile bootstrap over rounds (Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, chapter 13).
"""

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
LEAST = 0.02  # a smaller effect is not claimed, however narrow its interval
FEWEST = 6  # rounds for a claim: of 5, all lie on one side of 1 by chance once in 16 times


def throughput(windows: list[dict]) -> float:
    """Images/s of a launch: all its images over all its seconds, never a mean of rates.

    windows: the train records after the warm-up; seconds are the slowest process's.
    """
    return sum(w["images"] for w in windows) / sum(w["seconds"] for w in windows)


def resampled_medians(values, seed: int = 0) -> np.ndarray:
    """The medians of RESAMPLES resamples of the values, drawn with replacement.

    Only the places of a resample's middle are drawn, not the resample: the k-th smallest of n
    uniform numbers is Beta(k, n + 1 - k) distributed, and the next one is the smallest of n - k on
    what is left (David and Nagaraja, Order Statistics, 2003, section 2.3). So 1,000 rounds cost no
    more than 10.
    """
    values, dice = np.sort(np.asarray(values, dtype=float)), np.random.default_rng(seed)
    n = len(values)
    k = (n + 1) // 2
    low = dice.beta(k, n + 1 - k, RESAMPLES)
    high = low if n % 2 else 1 - (1 - low) * dice.random(RESAMPLES) ** (1 / (n - k))
    places = [np.minimum((place * n).astype(int), n - 1) for place in (low, high)]
    return (values[places[0]] + values[places[1]]) / 2


def together(claims: int) -> float:
    """The level at which each of several intervals must be taken, for all to hold at LEVEL
    together: Bonferroni's inequality. Else of 20 equal cases one would be called faster or slower.
    """
    return 1 - (1 - LEVEL) / max(1, claims)


def median_interval(values, seed: int = 0, level: float = LEVEL) -> tuple[float, float, float]:
    """The median and its bootstrap interval at a level; with fewer than 3 values, their range."""
    values = np.asarray(values, dtype=float)
    if len(values) < 3:
        return float(np.median(values)), float(values.min()), float(values.max())
    ends = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.percentile(resampled_medians(values, seed), ends)
    return float(np.median(values)), float(low), float(high)


def ratio_interval(
    case: dict[int, float], reference: dict[int, float], level: float = LEVEL
) -> tuple | None:
    """The ratio case / reference, paired by round: median, low, high; None without a pair.

    Both map a round's number to images/s.
    """
    rounds = sorted(case.keys() & reference.keys())
    if not rounds:
        return None
    logs = [np.log(case[k] / reference[k]) for k in rounds]
    return tuple(float(np.exp(x)) for x in median_interval(logs, level=level))


def margin(*controls: tuple | None, least: float = LEAST) -> float:
    """The log-ratio that an effect must exceed: the least one, and every control's farther limit.

    A control is the ratio, with its interval, of the reference run twice.
    """
    limits = [abs(np.log(x)) for control in controls if control for x in control[1:]]
    return float(max([np.log1p(least), *limits]))


def verdict(ratio: tuple | None, control: tuple | None, rounds: int) -> str:
    """In a word what a ratio allows to claim: faster, slower, tie, or why nothing.

    A difference is claimed only where its interval, at the level of `together`, excludes 1 and the
    effect is beyond 2% and beyond the control's farther limit; where the control itself excludes 1,
    nothing is.
    """
    if ratio is None or control is None:
        return ""
    if rounds < FEWEST:
        return "too few rounds"
    if not control[1] <= 1 <= control[2]:
        return "too noisy"
    if ratio[1] <= 1 <= ratio[2] or abs(np.log(ratio[0])) <= margin(control):
        return "tie"
    return "faster" if ratio[0] > 1 else "slower"


def pairs(speeds: dict[str, dict[int, float]], control: tuple | None) -> dict[tuple, str]:
    """The verdict on every ordered pair of cases: {(a, b): "faster"} where a is faster than b.

    speeds maps a case to its images/s by round. The verdicts hold together.
    """
    found, level = {}, together(len(speeds) * (len(speeds) - 1) // 2)
    for a, mine in speeds.items():
        for b, theirs in speeds.items():
            if a != b:
                shared = len(mine.keys() & theirs.keys())
                found[a, b] = verdict(ratio_interval(mine, theirs, level), control, shared)
    return found


def ranks(speeds: dict[str, dict[int, float]], control: tuple | None) -> dict[str, int]:
    """The rank of each case: 1 and as many as are faster than it; ties share a rank.

    Empty where nothing can be ranked: too few rounds, or too noisy a machine.
    """
    verdicts = pairs(speeds, control)
    if not set(verdicts.values()) <= {"faster", "slower", "tie"}:
        return {}
    return {a: 1 + sum(verdicts[b, a] == "faster" for b in speeds if b != a) for a in speeds}
