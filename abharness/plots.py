"""Numbers -> plots as SVG text for a page: every launch as a point, medians as lines. Drawn by matplotlib; pure.

Colours in the SVG are CSS variables of the page (`--ink`, `--baseline`, ...), so that one file reads in light, in dark and
on paper. Variants differ by the shape of their marker too, never by colour alone. A plot takes its texts literally:
nothing in a name is read as mathematics, and every id is the plot's own.
"""

from __future__ import annotations

import hashlib
import html
import io
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from abharness.record import Variant
from abharness.spec import VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAINT = {
    "ink": "#010101",
    "muted": "#020202",
    "grid": "#030303",
    "baseline": "#040404",
    "candidate": "#050505",
    "window": "#060606",
    "capped": "#070707",
    "throttled": "#080808",
}
"""Stand-ins that matplotlib draws with, by the CSS variable that takes their place."""

_SHAPE: dict[Variant, str] = {"baseline": "o", "candidate": "D"}

_LINE: dict[Variant, Any] = {"baseline": "-", "candidate": (0, (5, 2))}

_MOST_INNER = 24
"""Small points drawn for one launch; of more, as many evenly spaced ones in order of size, the extremes among them."""

_POINTS_PER_INCH = 72

_LEAST_RANGE = 0.04
"""A plot spans at least this share of its median: noise of a thousandth must not look like a landslide."""


@dataclass(frozen=True, slots=True)
class LaunchPoints:
    """One launch in one panel.

    Attributes:
        label: Which launch, as the axis names it.
        value: The launch's own value: what the comparison uses.
        inner: What it is the median of (repeats or requests), drawn small; empty where there is nothing inside.
    """

    label: str
    variant: Variant
    value: float
    inner: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """One variant over a shape of load.

    Attributes:
        x: Concurrency, or prompt tokens.
        medians: At each x, the median of the launches.
        launches: At each x, every launch's value.
    """

    variant: Variant
    x: tuple[float, ...]
    medians: tuple[float, ...]
    launches: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, seconds from the launch's first sample."""

    start_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Trail:
    """One GPU over one launch: clocks and power against time.

    Attributes:
        clock: (seconds, MHz) of the SM clock.
        power: (seconds, W).
        windows: Measured cells.
        capped: When the driver held the clocks down for the power limit.
        throttled: When it did for heat, or for the power supply.
        power_limit_w: Drawn as a line; None where it is not known.
    """

    variant: Variant
    clock: tuple[tuple[float, float], ...]
    power: tuple[tuple[float, float], ...]
    windows: tuple[Span, ...]
    capped: tuple[Span, ...]
    throttled: tuple[Span, ...]
    power_limit_w: float | None = None


def launches_plot(points: Sequence[LaunchPoints], medians: dict[Variant, float], *, unit: str, about: str) -> str:
    """Every launch in the order of time, what is inside it as small points, the median of each variant as a line.

    Args:
        points: In the order of the launches.
        medians: By variant.
        unit: Of the values.
        about: What a screen reader says.
    """
    with _drawing(250, 170) as figure:
        axes = _axes(figure)
        for variant in VARIANTS:
            own = [(place, point) for place, point in enumerate(points) if point.variant == variant]
            colour = _PAINT[variant]
            for place, point in own:
                inner = _thinned(point.inner)
                near = [place + _beside(index, len(inner)) for index in range(len(inner))]
                axes.plot(near, inner, "o", color=colour, alpha=0.4, markersize=2.8, markeredgewidth=0)
            axes.plot(
                [place for place, _ in own],
                [point.value for _, point in own],
                _SHAPE[variant],
                color=colour,
                markersize=6,
                markeredgecolor=_PAINT["ink"],
                markeredgewidth=0.6,
            )
            if variant in medians:
                axes.axhline(medians[variant], color=colour, linewidth=1.2, linestyle=_LINE[variant], zorder=1)
        _widen(axes, [point.value for point in points] + [value for point in points for value in point.inner])
        axes.set_xticks(range(len(points)), [point.label for point in points])
        axes.set_xlim(-0.6, len(points) - 0.4)
        axes.set_ylabel(unit)
        return _svg(figure, about)


def curves_plot(curves: Sequence[Curve], *, xlabel: str, unit: str, about: str) -> str:
    """Medians as a line through every launch's points, both variants, over the concurrency or the prompt's length."""
    with _drawing(330, 210) as figure:
        axes = _axes(figure)
        places = sorted({x for curve in curves for x in curve.x})
        for curve in curves:
            colour = _PAINT[curve.variant]
            for x, values in zip(curve.x, curve.launches, strict=True):
                axes.plot(
                    [x] * len(values), values, _SHAPE[curve.variant], color=colour, alpha=0.55, markersize=4.5,
                    markeredgewidth=0,
                )  # fmt: skip
            axes.plot(curve.x, curve.medians, linestyle=_LINE[curve.variant], color=colour, linewidth=1.4)
            axes.plot([], [], _SHAPE[curve.variant], linestyle=_LINE[curve.variant], color=colour, label=curve.variant)
        if places[0] > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(unit)
        axes.legend(loc="best", frameon=False, labelcolor=_PAINT["ink"])
        return _svg(figure, about)


def trail_plot(trail: Trail, *, top_mhz: float, top_w: float, about: str) -> str:
    """Clocks above power over one launch; measured windows in grey, what held the clocks down shaded.

    Args:
        trail: What to draw.
        top_mhz: Upper end of the clock axis, the same for all launches of a page: they are to be compared.
        top_w: Upper end of the power axis.
        about: What a screen reader says.
    """
    with _drawing(680, 220) as figure:
        clock, power = figure.subplots(2, 1, sharex=True)
        for axes, series, unit, top in ((clock, trail.clock, "SM MHz", top_mhz), (power, trail.power, "W", top_w)):
            _style(axes)
            for span in trail.windows:
                axes.axvspan(span.start_s, span.end_s, color=_PAINT["window"], alpha=0.22, linewidth=0)
            for name, spans in (("capped", trail.capped), ("throttled", trail.throttled)):
                for span in spans:
                    axes.axvspan(span.start_s, span.end_s, color=_PAINT[name], alpha=0.3, linewidth=0)
            axes.plot(
                [t for t, _ in series], [value for _, value in series], color=_PAINT[trail.variant], linewidth=0.9
            )
            axes.set_ylabel(unit)
            axes.set_ylim(0, top * 1.08)
        if trail.power_limit_w is not None:
            power.axhline(trail.power_limit_w, color=_PAINT["muted"], linewidth=0.8, linestyle=(0, (2, 2)))
        wide = max((t for t, _ in (*trail.clock, *trail.power)), default=1.0)
        for span in trail.windows:
            if span.end_s - span.start_s > wide / 18:
                middle = (span.start_s + span.end_s) / 2
                clock.text(
                    middle, top_mhz * 1.1, span.label, ha="center", va="bottom", fontsize=7, color=_PAINT["muted"]
                )
        power.set_xlabel("seconds of the launch")
        return _svg(figure, about)


class _drawing:  # noqa: N801 - used like a function
    """A figure of a size in pixels, drawn with this module's settings."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width / _POINTS_PER_INCH, height / _POINTS_PER_INCH)

    def __enter__(self) -> Figure:
        # The first import on a machine tells of its font cache on stderr, which is no news to anybody here.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        import matplotlib as mpl
        from matplotlib.figure import Figure

        self._settings = mpl.rc_context(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "abharness",
                "text.parse_math": False,
                "font.size": 8,
                "axes.formatter.useoffset": False,
                "figure.constrained_layout.use": True,
                "figure.dpi": _POINTS_PER_INCH,
            }
        )
        self._settings.__enter__()
        return Figure(figsize=self._size)

    def __exit__(self, *error: Any) -> None:
        self._settings.__exit__(*error)


def _axes(figure: Figure) -> Axes:
    axes = figure.subplots()
    _style(axes)
    return axes


def _style(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.grid(visible=True, axis="y", color=_PAINT["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_PAINT["muted"], labelcolor=_PAINT["ink"], length=2.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_PAINT["muted"])
    axes.xaxis.label.set_color(_PAINT["ink"])
    axes.yaxis.label.set_color(_PAINT["ink"])


def _widen(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    middle = (low + high) / 2
    half = max((high - low) / 2 * 1.12, abs(middle) * _LEAST_RANGE / 2, 1e-12)
    axes.set_ylim(middle - half, middle + half)


def _thinned(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    if len(ordered) <= _MOST_INNER:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / (_MOST_INNER - 1))] for index in range(_MOST_INNER)]


def _beside(index: int, count: int) -> float:
    """Where a small point stands beside its launch: from the smallest at the left to the largest at the right."""
    return 0.0 if count < 2 else 0.56 * (index / (count - 1) - 0.5)


_NOT_SVG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_OWN_SIZE = re.compile(r' (?:width|height)="[0-9.]+pt"')
_STYLE_BLOCK = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
_FONT = re.compile(r" font-family: [^;\"]*;")
_NO_TURN = re.compile(r' transform="rotate\(-0 [^"]*"')
_INDENT = re.compile(r"\n\s+")
_ID = re.compile(r' id="([^"]*)"')
_USED = re.compile(r"(?<=[\"(]#)[^\")]+")


def _svg(figure: Figure, about: str) -> str:
    """The figure as an `<svg>` element: colours by name, the page's font, no id that another plot could have."""
    figure.patch.set_visible(False)
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=nothing)
    text = _NOT_SVG.sub("", out.getvalue(), count=1)
    text = _OWN_SIZE.sub("", text, count=2)
    for pattern in (_STYLE_BLOCK, _FONT, _NO_TURN):
        text = pattern.sub("", text)
    text = _INDENT.sub("\n", text)
    for name, stand_in in _PAINT.items():
        text = text.replace(stand_in, f"var(--{name})")
    used = set(_USED.findall(text))
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    text = _ID.sub(lambda found: f' id="{own}{found[1]}"' if found[1] in used else "", text)
    text = _USED.sub(lambda found: own + found[0], text)
    width = figure.get_size_inches()[0] * _POINTS_PER_INCH
    head = f'<svg role="img" aria-label="{html.escape(about)}" style="width:{width:.0f}px" '
    return text.replace("<svg ", head, 1).strip()
