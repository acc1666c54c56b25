"""Latency and bandwidth of measured points, and the interval of a sample."""

import math

Fit = tuple[float, float]  # latency in seconds, bandwidth in bytes/s
UNSEEN = 1e14  # bytes/s: more than this means that the times don't grow with the sizes


def fit(points: list[tuple[float, float]]) -> Fit:
    """Latency and bandwidth of points (bus bytes, seconds): seconds = latency + bytes / bandwidth,
    neither negative. Least squares of the relative errors, again and again with less weight for
    points that are far off, which ends near the least sum of |log|: where small sizes do not follow
    the line, the large ones still determine the bandwidth.
    """
    rows = [(1 / t**2, x, t) for x, t in points]  # weight, bytes, seconds
    for _ in range(30):
        a, b, c = (sum(w * x**k for w, x, _ in rows) for k in range(3))
        d, e = (sum(w * t * x**k for w, x, t in rows) for k in range(2))
        det = a * c - b * b
        latency = max(0.0, (d * c - e * b) / det) if det > 1e-9 * a * c else 0.0
        slope = max(1e-15, (e - b * latency) / c)
        lines = [(x, t, latency + slope * x) for x, t in points]
        rows = [(1 / (t * y * max(0.01, abs(math.log(y / t)))), x, t) for x, t, y in lines]
    return latency, 1 / slope


def ends(values: list[float]) -> tuple[float, float]:
    """The ends of the 95% interval of a sample."""
    found = sorted(values)
    return found[int(0.025 * (len(found) - 1))], found[-1 - int(0.025 * (len(found) - 1))]
