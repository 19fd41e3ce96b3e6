"""Comparisons -> one HTML file that needs nothing else: no network, no script, works from disk.

Model answers, log lines and names are hostile text. Three things keep them from being anything but text: every value is
escaped by the template engine, control characters and those that turn the reading direction are shown by their numbers,
and the page's own policy forbids scripts and every fetch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from abharness import __version__
from abharness.compare import Comparison
from abharness.index import counted, index, ordered
from abharness.page import Budget, article
from abharness.redaction import screen_safe
from abharness.runs import read_run

_MARK = re.compile(r" \[(\d+)\]")


def render(comparisons: Sequence[Comparison]) -> str:
    """All comparisons as one page, an index first where there are several.

    Args:
        comparisons: With the runs that `sources` names still there: plots and answers are read from them.

    Raises:
        RecordError: A run cannot be read any more.
    """
    budget = Budget()
    articles = [
        article(comparison, [read_run(Path(source)) for source in comparison.sources], number, budget)
        for number, comparison in enumerate(ordered(comparisons), start=1)
    ]
    environment = Environment(
        loader=PackageLoader("abharness"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters["marked"] = _marked
    environment.filters["plot"] = Markup
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    template = environment.get_template("report.html.j2")
    entries = index(comparisons)
    return (
        template.render(
            articles=articles, index=entries, counted=counted(entries), left_out=budget.left_out, version=__version__
        )
        + "\n"
    )


def _visible(value: Any) -> Any:
    """Text without characters that hide or move what stands beside them; what the page itself made stays as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return screen_safe(value, lines=True)
    return value


def _marked(text: str, anchor: str) -> Markup:
    """A table's last column with its footnote marks as links."""
    links = [Markup('<a href="#{0}-note-{1}">{1}</a>').format(anchor, number) for number in _MARK.findall(text)]
    marks = Markup("<sup>{0}</sup>").format(Markup(", ").join(links)) if links else ""
    return escape(_visible(_MARK.sub("", text))) + marks
