"""Comparison -> text, Markdown and JSON. Scaling to readable units happens only here.

The question and the verdict come first; over several runs, an index of them. A change that was not called prints `~`:
its percentage is withheld, so that nobody can quote noise. Remarks are numbered footnotes under the table.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import Any

from abharness import indexview, stats
from abharness.cells import Cell, Row
from abharness.codes import CODES, code_of
from abharness.compare import Comparison
from abharness.executed import PhaseKernels
from abharness.failures import COMMAND_TITLE, command_lines, last_words
from abharness.index import ordered, verdict
from abharness.kernels import labels
from abharness.paired import Accuracy, ChangedAnswer
from abharness.record import Variant
from abharness.redaction import screen_safe
from abharness.spec import VARIANTS
from abharness.terminal import PLAIN, TABLE_WIDTH, Look, Role, Section, statement, table
from abharness.waivers import flag as waiver_flag

NAMED_CHANGES = 10  # changed answers told one by one; the rest are counted, and all are in the JSON

NAMED_FINDINGS = 2  # findings of one code told one by one

SHOWN_KERNELS = 6  # kernels of a traced phase told one by one; all are in the JSON


class _Footnotes:
    """Numbered once each, in order of first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"


def render(comparisons: list[Comparison], form: str, *, all_metrics: bool = False, look: Look = PLAIN) -> str:
    """All comparisons as `text`, `markdown` or `json`; JSON has every metric in any case.

    Args:
        comparisons: Several are preceded by an index, in text and Markdown, and come in its order.
        form: One of the three.
        all_metrics: Every metric, not only the chief ones.
        look: How text is laid out.
    """
    if form == "json":
        data = {"comparisons": [to_json(item) for item in comparisons]}
        return json.dumps(data, indent=1, allow_nan=False, default=lambda record: record.model_dump(mode="json")) + "\n"
    if form == "markdown":
        parts = [_markdown(item, all_metrics=all_metrics) for item in ordered(comparisons)]
        between = "\n\n---\n\n"
        first = indexview.markdown(comparisons, _escape)
    else:
        parts = [_text(item, look, all_metrics=all_metrics) for item in ordered(comparisons)]
        between = f"\n\n{'-' * TABLE_WIDTH}\n\n"
        first = "\n".join(indexview.text(comparisons, look))
    return between.join(parts if len(parts) == 1 else [first, *parts]) + "\n"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as data, stored units, with what it concludes; findings are still record models."""
    data = dataclasses.asdict(comparison)
    data["exit_code"] = comparison.exit_code
    return data


def _value(values: list[float], row: Row) -> str:
    if not values:
        return "-"
    shown = statistics.median(values) * row.metric.display_scale
    around = stats.spread(values)
    digits = 0 if abs(shown) >= 1000 else 1 if abs(shown) >= 100 else 2
    return f"{shown:.{digits}f}" + ("" if around is None else f" ± {around:.0%}")


def _change(row: Row, launches: str, notes: _Footnotes) -> str:
    p = "" if row.p is None else f" (p={row.p:.3f} {launches})"
    marks = "".join(f" {notes.mark(_explain(note))}" for note in row.notes)
    if row.call in ("better", "worse"):
        assert row.ratio.effect is not None
        low, high = ("unknown" if end is None else f"{end:+.1%}" for end in (row.ratio.low, row.ratio.high))
        return f"{row.ratio.effect:+.2%} {row.call}{p} [{low}, {high}]{marks}"
    if row.call == "no verdict":
        return f"no verdict{marks}"
    return f"~{p}{marks}"


def _explain(note: str) -> str:
    code = CODES.get(note)
    return f"{note}: {code.meaning}" if code else note


def _launches(comparison: Comparison) -> str:
    counts = [comparison.launches[variant][0] for variant in VARIANTS]
    return f"n={counts[0]}" if counts[0] == counts[1] else f"n={counts[0]}+{counts[1]}"


def shown_rows(cell: Cell, *, all_metrics: bool = False) -> list[Row]:
    """The rows of a cell that a report shows: the chief metrics, and what decides."""
    return [row for row in cell.rows if all_metrics or row.metric.chief or row.decisive]


def _rows(cell: Cell, comparison: Comparison, notes: _Footnotes, *, all_metrics: bool) -> list[list[str]]:
    launches = _launches(comparison)
    rows = [
        [
            f"{row.metric.name} {row.metric.display_unit}",
            *(_value(row.samples[variant], row) for variant in VARIANTS),
            _change(row, launches, notes),
        ]
        for row in shown_rows(cell, all_metrics=all_metrics)
    ]
    for item in cell.conditions:
        values = [item.values[variant] for variant in VARIANTS]
        rows.append([item.name, *("-" if value is None else f"{value:.0f}" for value in values), ""])
    return rows


def _accuracy_rows(item: Accuracy, notes: _Footnotes) -> list[list[str]]:
    def share(right: int) -> str:
        return f"{right}/{item.num_questions}"

    word = {"worse": "worse ", "better": "better ", "~": "~ ", "no verdict": "no verdict "}[item.call]
    change = f"{word}(p={item.p:.3f}, McNemar {item.only_baseline}:{item.only_candidate})"
    change += "".join(f" {notes.mark(note)}" for note in item.notes)
    rows = [["exact_match", *(share(item.right[variant]) for variant in VARIANTS), change]]
    for state in ("truncated", "no_answer", "error"):
        if any(item.states[variant].get(state) for variant in VARIANTS):
            rows.append([state, *(str(item.states[variant].get(state, 0)) for variant in VARIANTS), ""])
    marks = "".join(f" {notes.mark(told_change(change))}" for change in item.changed[:NAMED_CHANGES])
    if len(item.changed) > NAMED_CHANGES:
        marks += f" and {len(item.changed) - NAMED_CHANGES} more"
    differ = f"{len(item.changed)} of {item.num_questions} answers differ{marks}"
    rows.append(["answers", "", "", differ])
    within = ", ".join(f"{item.flips_within[variant]}" for variant in VARIANTS)
    rows.append(["flips between launches", *within.split(", "), f"{item.identical_texts} texts identical"])
    return rows


def told_change(change: ChangedAnswer) -> str:
    """One changed answer in a sentence: what, where the texts part, whether that was a near-tie, who else flips it."""
    flip = change.flip
    text = f"question {change.doc_id}: {change.baseline} against {change.candidate}"
    if flip.position is not None:
        text += f"; diverges at token {flip.position}"
    if flip.near_tie is not None:
        gaps = " and ".join("unknown" if gap is None else f"{gap:.2f}" for gap in (flip.gap_a, flip.gap_b))
        text += f", {'a near-tie' if flip.near_tie else 'not a near-tie'} (gaps {gaps} nats)"
    elif flip.reason:
        text += f"; {flip.reason}"
    text += "; launches of one variant flip it too" if change.flips_within else ""
    return text + {None: "", True: "; the A/A flips it too", False: "; the A/A does not flip it"}[change.flips_in_aa]


def _opening(comparison: Comparison) -> list[str]:
    """The question, if one was asked, and the verdict."""
    question = " ".join(comparison.question.split())
    return [question, comparison.summary] if question else [comparison.summary]


def counts(comparison: Comparison) -> str:
    """How many launches of each variant completed."""
    return ", ".join(
        f"{variant} {done} of {planned} launches" for variant, (done, planned) in comparison.launches.items()
    )


def _title(comparison: Comparison) -> str:
    aa = " A/A, the baseline against itself" if comparison.aa else ""
    return f"{comparison.experiment}{aa}  {counts(comparison)}"


def _declared(comparison: Comparison) -> list[str]:
    """The declared differences, and what proves that the server acts on them."""
    lines = []
    for name, values in comparison.switches.items():
        lines.append(f"switch {name}: {_setting(values, 'baseline')} -> {_setting(values, 'candidate')}")
    called = any(row.call in ("better", "worse") for cell in comparison.cells for row in cell.rows if row.decisive)
    unproven = "no log line or setting shows it; the difference does" if called else "not proven beyond its delivery"
    if not all(done for done, _ in comparison.launches.values()):
        unproven = "not known, since a variant has no completed launch"
    for effect in comparison.effects:
        lines.append(f"effect of {effect.name}: {effect.proof or unproven}")
    return lines


def _setting(values: dict[Variant, str | None], variant: Variant) -> str:
    value = values[variant]
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def problems(comparison: Comparison) -> list[str]:
    """What stands against a verdict, each with its next step and what would accept it, one line each."""
    lines: list[str] = []
    for code in comparison.codes:
        found = [item for item in comparison.seen if item.finding.code == code]
        lines += [f"{code}: {item.where}: {item.finding.message}" for item in found[:NAMED_FINDINGS]]
        if len(found) > NAMED_FINDINGS:
            lines.append(f"{code}: and {len(found) - NAMED_FINDINGS} more like these, all in the JSON")
        lines.append(f"  next: {found[0].finding.hint or code_of(code).next_step}")
        flags = dict.fromkeys(flag for item in found[:NAMED_FINDINGS] if (flag := waiver_flag(item)))
        if flags:
            lines.append(f"  if this cannot matter, compare with {' '.join(flags)}")
    return lines


def remarks(comparison: Comparison) -> list[str]:
    """Notes, floors, waivers and warnings, one line each."""
    lines: list[str] = []
    for code in dict.fromkeys(item.finding.code for item in comparison.advice):
        found = [item for item in comparison.advice if item.finding.code == code]
        more = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        lines.append(
            f"note: {found[0].where}: {found[0].finding.message}{more}; {found[0].finding.hint or ''}".rstrip("; ")
        )
    lines += _floor(comparison)
    lines += [f"waived: {item.finding.code}: {item.where}: {item.finding.message}" for item in comparison.waived]
    lines += [f"note: {text}" for text in comparison.notes]
    return lines + [f"warning: {text}" for text in comparison.warnings]


def _floor(comparison: Comparison) -> list[str]:
    """What an A/A measured: the floor of every decisive row, and the answers that flip."""
    floor = comparison.floor
    if floor is None:
        return []
    lines = [
        f"A/A floor of {floor.launches} launches: equal variants of {floor.group} differ by no more than this "
        f"(half the range of all launches as ±)"
    ]
    limits = {(item.key, item.metric): item for item in floor.cells}
    for cell in comparison.cells:
        for row in cell.rows:
            item = limits.get((cell.key, row.metric.name)) if row.decisive else None
            if item is not None:
                around = "" if item.spread is None else f" (± {item.spread:.2%})"
                lines.append(f"floor: {cell.key} {row.metric.name} {item.floor:.2%}{around}")
    for answers in floor.answers:
        named = ", ".join(map(str, answers.flips[:NAMED_CHANGES]))
        more = len(answers.flips) - NAMED_CHANGES
        which = f" ({named}{f' and {more} more' if more > 0 else ''})" if answers.flips else ""
        lines.append(
            f"floor: {answers.workload} {len(answers.flips)} of {answers.num_questions} questions flip{which}; two "
            f"launches differ in up to {answers.most_changed}; right answers of equal variants by up to {answers.net}"
        )
    return lines


def _sections(comparison: Comparison, notes: _Footnotes, *, all_metrics: bool) -> list[Section]:
    sections: list[Section] = []
    for cell in comparison.cells:
        sections.append((str(cell.key), _rows(cell, comparison, notes, all_metrics=all_metrics)))
    for item in comparison.accuracy:
        sections.append((f"{item.workload} {item.num_questions} questions", _accuracy_rows(item, notes)))
    return sections


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of a report, with the footnotes that their last column refers to.

    Attributes:
        cells: Of each cell, in order: its metrics, then what the GPUs did.
        accuracy: Of each gsm8k workload.
        kernels: Of each traced phase.
    """

    cells: list[Section]
    accuracy: list[Section]
    kernels: list[Section]
    footnotes: list[str]


def tables(comparison: Comparison) -> Tables:
    """The tables that `text` and `markdown` show, for another layout."""
    notes = _Footnotes()
    sections = _sections(comparison, notes, all_metrics=False)
    many = len(comparison.cells)
    return Tables(sections[:many], sections[many:], _kernel_sections(comparison), notes.texts)


def _kernel_sections(comparison: Comparison) -> list[Section]:
    """The traced phases, each with the kernels of the longest time and those that tell the variants apart."""
    return [
        (f"{'kernels' if phase.on_device else 'CPU operators'} of {phase.name}, calls and time a step under the profiler",
         _kernel_rows(phase))
        for phase in comparison.kernels
    ]  # fmt: skip


def _kernel_rows(phase: PhaseKernels) -> list[list[str]]:
    shown = phase.rows[:SHOWN_KERNELS]
    named = labels([row.name for row in phase.rows])
    rows = [["all", *(_microseconds(phase.busy_s[variant]) for variant in VARIANTS), ""]]
    for row in shown:
        only = next((variant for variant in VARIANTS if row.name in phase.only[variant]), None)
        uses = [_use(row.calls[variant], row.time_s[variant]) for variant in VARIANTS]
        rows.append([named[row.name], *uses, "" if only is None else f"only in the {only}"])
    for variant in VARIANTS:
        rest = [named[name] for name in phase.only[variant] if name not in {row.name for row in shown}]
        if rest:
            more = f" and {len(rest) - SHOWN_KERNELS} more" if len(rest) > SHOWN_KERNELS else ""
            rows.append([f"only in the {variant} too: {', '.join(rest[:SHOWN_KERNELS])}{more}", "", "", ""])
        rows += [[f"{variant}: {reason}", "", "", ""] for reason in phase.unknown[variant]]
    if phase.compared and not phase.differs:
        rows.append(["the same kernels ran in both", "", "", ""])
    if phase.unstable:
        rows.append([f"{len(phase.unstable)} ran in some launches of a variant and not in others", "", "", ""])
    return rows


def _use(calls: float | None, time_s: float | None) -> str:
    return "-" if calls is None or time_s is None else f"{calls:g} x {time_s / calls * 1e6:.1f} us"


def _microseconds(time_s: float | None) -> str:
    return "unknown" if time_s is None else f"{time_s * 1e6:.0f} us"


_LEADS: dict[str, Role] = {"warning:": "unknown", "note:": "strong", "waived:": "unknown", "next:": "strong"}


def _text(comparison: Comparison, look: Look, *, all_metrics: bool) -> str:
    notes = _Footnotes()
    *question, summary = _opening(comparison)
    lines = [line for text in question for line in statement(text, look, role="strong")]
    lines += statement(summary, look, role=indexview.VERDICT_ROLES[verdict(comparison)])
    lines += ["", *statement(_title(comparison), look)]
    lines += [line for text in _declared(comparison) for line in statement(text, look)]
    lines += table(_sections(comparison, notes, all_metrics=all_metrics), "vs baseline", look)
    lines += table(_kernel_sections(comparison), "", look, whole_names=True)
    if notes.texts:
        lines.append("")
    for number, text in enumerate(notes.texts, start=1):
        lines += statement(f"[{number}] {text}", look)
    remarked = [*problems(comparison), *remarks(comparison)]
    if remarked:
        lines.append("")
    for remark in remarked:
        first = remark.split(maxsplit=1)[0]
        lines += statement(remark, look, lead="bad" if first.rstrip(":") in CODES else _LEADS.get(first))
    lines += _failed(comparison, look)
    # A path is copied: it is never wrapped.
    return "\n".join([*lines, "", *(screen_safe(f"records: {source}") for source in comparison.sources)])


def _failed(comparison: Comparison, look: Look) -> list[str]:
    """Of every launch that failed, the server's last words and the command that starts it again."""
    lines: list[str] = []
    for where, title, told in _failures(comparison):
        shown = [line for text in told for line in statement(f"  {text}", look)]
        if title == COMMAND_TITLE:
            # To be copied: a shell must find it as it is, line ends inside quotes too.
            shown = [screen_safe(text, lines=True) for text in told]
        lines += ["", *statement(f"{where}, {title}", look, role="strong"), *shown]
    return lines


def _failures(comparison: Comparison) -> list[tuple[str, str, list[str]]]:
    """Launch, title and lines; launches of a variant that failed in the same way are told once."""
    found: list[tuple[str, str, list[str]]] = []
    told: set[tuple[str, str, str]] = set()
    for item in comparison.failures:
        kind = (item.variant, item.failure.kind, item.failure.phase)
        if item.failure.kind == "KeyboardInterrupt" or kind in told:
            continue
        told.add(kind)
        if words := last_words(item.failure):
            found.append((item.where, "the server's last words", words))
        if item.failure.command:
            found.append((item.where, COMMAND_TITLE, command_lines(item.failure.command)))
    return found


def _code(text: str) -> str:
    """Text of a code block."""
    return "    " + screen_safe(text, lines=True).replace("\n", "\n    ")


def _escape(text: str) -> str:
    return screen_safe(text.replace("\n", " ")).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _markdown(comparison: Comparison, *, all_metrics: bool) -> str:
    notes = _Footnotes()
    *question, summary = _opening(comparison)
    lines = [f"## {_escape(_title(comparison))}", ""]
    lines += [f"{_escape(text)}  " for text in question]
    lines += [f"**{_escape(summary)}**", ""]
    lines += [f"{_escape(line)}  " for line in _declared(comparison)]
    for title, rows in _sections(comparison, notes, all_metrics=all_metrics):
        lines += ["", f"| {_escape(title)} | baseline | candidate | vs baseline |", "| --- | ---: | ---: | --- |"]
        lines += [f"| {' | '.join(map(_escape, row))} |" for row in rows]
    for title, rows in _kernel_sections(comparison):
        lines += ["", f"| {_escape(title)} | baseline | candidate | |", "| --- | ---: | ---: | --- |"]
        lines += [f"| {' | '.join(map(_escape, row))} |" for row in rows]
    if notes.texts:
        lines += ["", *(f"{number}. {_escape(text)}" for number, text in enumerate(notes.texts, start=1))]
    remarked = [*problems(comparison), *remarks(comparison)]
    if remarked:
        lines += ["", *(f"* {_escape(remark)}" for remark in remarked)]
    for where, title, told in _failures(comparison):
        lines += ["", f"{_escape(where)}, {_escape(title)}:", "", *(_code(text) for text in told)]
    return "\n".join([*lines, "", f"records: `{' '.join(comparison.sources)}`"])
