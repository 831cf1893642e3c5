"""A curve that grows for ever in bounded memory: when full, it halves its resolution."""

from __future__ import annotations

from p2pdiloco_daemon.status.view import CURVE_POINTS_MAX, CurvePoint


class Curve:
    """At most `CURVE_POINTS_MAX` points (step, mean of the values added since the point before)."""

    def __init__(self) -> None:
        self._points: list[CurvePoint] = []
        self._width = 1
        self._open: list[float] = []
        self._step = 0

    def add(self, step: int, value: float) -> None:
        """Steps come in rising order. A point carries the last step of those it averages."""
        self._step = step
        self._open.append(value)
        if len(self._open) < self._width:
            return
        self._points.append((step, _mean(self._open)))
        self._open.clear()
        if len(self._points) == CURVE_POINTS_MAX:
            self._halve()

    def points(self) -> tuple[CurvePoint, ...]:
        """All points, the last one of a bucket that may still be filling."""
        if not self._open:
            return tuple(self._points)
        return (*self._points, (self._step, _mean(self._open)))

    def _halve(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=True)
        self._points = [(second[0], (first[1] + second[1]) / 2) for first, second in pairs]
        self._width *= 2


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
