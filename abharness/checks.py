"""The checks of cells and answers that can be made from records alone: while a launch runs, and again by `compare`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal

from abharness.gpuchecks import Launches, check_clocks, check_gpus, check_power_cap, unknown_of_gpus
from abharness.prompts import combined_hash
from abharness.record import AccuracyRun, AnswerRecord, CellRecord, ClientLoad, Finding, RequestRecord, ServerCounters

CLIENT_CPU_SHARE_LIMIT = 0.85
"""Share of one core above which arrival times are the client's own: its loop has one thread, and queues near 1.0."""

LAG_RESOLUTION_S = 0.001
"""Part of a measured lag that is no lag: timers of an epoll loop are rounded up to whole milliseconds."""

LAG_SHARE_LIMIT = 0.10
"""Median lag as a share of the median time it lengthens: a late read lengthens a TTFT, and a step seen late a TPOT."""

PREFIX_HIT_LIMIT = 0.01
"""Share of prompt tokens found in the prefix cache above which a cell did not do the work it claims."""

TRUNCATION_LIMIT = 0.05
"""Share of truncated answers above which accuracy is doubtful: that many points of exact_match are unknown."""

OTHER_CPUS_LIMIT = 0.5
"""CPUs that others may use: one that is busy half of the time takes cache, memory bandwidth and clock of all."""

ROUNDING_S = 1e-6
"""Times of one monotonic clock that differ by less are equal."""


def check_cell(cell: CellRecord, requests: Sequence[RequestRecord]) -> list[Finding]:
    """Say what stands against using a cell's numbers.

    Args:
        cell: What was asked, and what was seen around it; what is None there was not checked, and is said to be.
        requests: Its requests.

    Returns:
        Findings, none of them fatal: the cell is recorded, and a comparison gives no verdict on it.
    """
    unlike = _check_whole(cell, requests)
    findings = [
        unlike,
        _check_times(cell, requests),
        _check_complete(requests),
        _check_prompt_tokens(requests, cell.input_len),
        _check_output_tokens(requests, cell.output_len),
        _check_client(requests, cell.client, cell.kind),
        _check_prefix_cache(requests, cell.counters),
        *(check_totals(requests, cell.counters, "requests") if unlike is None else ()),
        _check_compilation(cell),
        _check_host(cell),
        *check_gpus(cell),
        _not_checked([*unknown_counters(cell.counters), *_unknown_of_compilation(cell), *unknown_of_gpus(cell)]),
    ]
    return [finding for finding in findings if finding is not None]


def check_variants(cells: Launches) -> list[Finding]:
    """Check one cell across the variants: `clocks_differ`, and as advice `power_capped` and `preempted`.

    Args:
        cells: By variant, of each launch the records of this cell (its repeats).
    """
    findings = [check_clocks(cells), check_power_cap(cells), _check_preempted(cells)]
    return [finding for finding in findings if finding is not None]


def _check_preempted(cells: Launches) -> Finding | None:
    counts: dict[str, float | None] = {}
    for variant, part in cells.items():
        known = [cell.counters.preemptions if cell.counters else None for launch in part for cell in launch]
        counts[variant] = None if None in known else sum(count for count in known if count is not None)
    if not any(counts.values()):
        return None
    told = ", ".join(f"{variant} {'unknown' if n is None else f'{n:.0f}'}" for variant, n in counts.items())
    return Finding(
        code="preempted",
        message=f"requests were preempted and computed again: {told} time(s)",
        hint="give the server more KV cache (--gpu-memory-utilization, a shorter --max-model-len), or lower "
        "max_concurrency",
    )


def _check_whole(cell: CellRecord, requests: Sequence[RequestRecord]) -> Finding | None:
    # A lost or doubled line would change every rate of the cell and no other check would see it.
    ordered = sorted(requests, key=lambda request: request.index)
    if not requests or combined_hash(request.prompt_sha256 for request in ordered) == cell.prompts_sha256:
        return None
    return Finding(
        code="incomplete_requests",
        message=f"the {len(requests)} requests on record are not the ones this cell sent, by the hash of their prompts",
        hint="lines of requests.jsonl are missing, doubled or from elsewhere; rerun this launch",
    )


def _check_times(cell: CellRecord, requests: Sequence[RequestRecord]) -> Finding | None:
    # A request can only be timed wrongly by damage: every rate and latency would follow it.
    off = set()
    for request in requests:
        if request.error is None and None in (request.first_token_s, request.last_token_s):
            off.add(request.index)
        begin = (cell.started_s, request.submitted_s)
        # The client may come to note that it has sent a request after the answer's first bytes are in.
        for chain in ((*begin, request.first_token_s, request.last_token_s), (*begin, request.sent_s)):
            known = [time_s for time_s in (*chain, cell.ended_s) if time_s is not None]
            if any(later < earlier - ROUNDING_S for earlier, later in pairwise(known)):
                off.add(request.index)
    if not off:
        return None
    return Finding(
        code="incomplete_requests",
        message=f"the times of {len(off)} of {len(requests)} requests are missing, out of order or outside the window: "
        f"{_some(off)}",
        hint="requests.jsonl or launch.json is damaged; rerun this launch",
    )


def _check_complete(requests: Sequence[RequestRecord]) -> Finding | None:
    errors = Counter(request.error for request in requests if request.error is not None)
    if requests and not errors:
        return None
    kinds = "; ".join(f"{count} x {error}" for error, count in errors.most_common(3))
    rest = f"; {len(errors) - 3} other kinds" if len(errors) > 3 else ""
    return Finding(
        code="incomplete_requests",
        message=f"{errors.total()} of {len(requests)} requests failed: {kinds}{rest}"
        if errors
        else "no request was sent",
        hint="failed requests are in no latency and no rate; read the server's log at that time",
    )


def _check_prompt_tokens(requests: Sequence[RequestRecord], input_len: int) -> Finding | None:
    whole = [request for request in requests if request.error is None]
    silent = sum(request.prompt_tokens is None for request in whole)
    if silent:
        return Finding(
            code="prompt_tokens_mismatch",
            message=f"the server did not count the prompt tokens of {silent} of {len(whole)} requests",
            hint="its usage has no prompt_tokens: that it did the work that was asked for is not shown",
        )
    counts = [request.prompt_tokens for request in requests if request.prompt_tokens is not None]
    off = [count for count in counts if count != input_len]
    if not off:
        return None
    return Finding(
        code="prompt_tokens_mismatch",
        message=f"the server counted {min(off)} to {max(off)} prompt tokens instead of {input_len} "
        f"in {len(off)} of {len(counts)} requests",
        hint="prompts are sent as token ids: a server that adds or drops tokens does other work than asked for",
    )


def _check_output_tokens(requests: Sequence[RequestRecord], output_len: int) -> Finding | None:
    # A request that failed is incomplete; only one that ended well can be too short.
    whole = [request for request in requests if request.error is None]
    off = [request for request in whole if request.output_tokens != output_len]
    if not off:
        return None
    counts = [request.output_tokens or 0 for request in off]
    reasons = Counter(request.finish_reason for request in off)
    name = "short outputs" if max(counts) < output_len else "outputs of another length"
    return Finding(
        code="output_tokens_mismatch",
        message=f"{name}: {len(off)} of {len(whole)} ({min(counts)} to {max(counts)} tokens instead of {output_len}; "
        f"finish_reason {', '.join(f'{reason} x {count}' for reason, count in reasons.items())})",
        hint="ignore_eos was sent: look for stop ids in the model's generation_config or for the context limit",
    )


def _check_client(
    requests: Sequence[RequestRecord], client: ClientLoad, kind: Literal["decode", "prefill"]
) -> Finding | None:
    whole = [request for request in requests if request.error is None]
    ttfts = [r.first_token_s - r.submitted_s for r in whole if r.first_token_s is not None]
    tpots = [
        (r.last_token_s - r.first_token_s) / (tokens - 1)
        for r in whole
        if r.first_token_s is not None and r.last_token_s is not None and (tokens := r.output_tokens or 0) > 1
    ]
    # Medians are compared, so the median lag is what would move them; the timer's own rounding is no lag.
    lag_s = client.loop_lag_p50_s - LAG_RESOLUTION_S
    seen = []
    if client.cpu_share >= CLIENT_CPU_SHARE_LIMIT:
        seen.append(f"the client used {client.cpu_share:.2f} of a core (limit {CLIENT_CPU_SHARE_LIMIT})")
    for name, values in (("TTFT", ttfts), ("TPOT", tpots if kind == "decode" else [])):
        if values and lag_s > LAG_SHARE_LIMIT * statistics.median(values):
            seen.append(
                f"its loop ran {client.loop_lag_p50_s * 1e3:.1f} ms late (median; limit {LAG_SHARE_LIMIT:.0%} of a "
                f"median {name} of {statistics.median(values) * 1e3:.1f} ms, and {LAG_RESOLUTION_S * 1e3:g} ms for the "
                "timer)"
            )
    if not seen:
        return None
    return Finding(
        code="client_bound",
        message="; ".join(seen),
        hint="the times are partly the client's own: give it a free core, or lower max_concurrency",
    )


def _check_prefix_cache(requests: Sequence[RequestRecord], counters: ServerCounters | None) -> Finding | None:
    if counters is not None and counters.prefix_cache_hits is not None and counters.prefix_cache_queries is not None:
        source, hits, queries = "/metrics", counters.prefix_cache_hits, counters.prefix_cache_queries
    else:
        known = [(r.cached_tokens, r.prompt_tokens) for r in requests if r.cached_tokens is not None]
        source, hits, queries = "usage", float(sum(c for c, _ in known)), float(sum(p or 0 for _, p in known))
    if hits <= PREFIX_HIT_LIMIT * queries:
        return None
    return Finding(
        code="prefix_cache_hits",
        message=f"{hits:.0f} of {queries:.0f} prompt tokens came from the prefix cache by {source} "
        f"({hits / queries if queries else 1:.1%}, limit {PREFIX_HIT_LIMIT:.0%})",
        hint="every prompt of a launch is unique: look for other traffic, or a server that prepends text of its own",
    )


def unknown_counters(counters: ServerCounters | None) -> list[str]:
    """Names of the server's counters that could not be read around a window."""
    if counters is None:
        return ["the server's counters (/metrics could not be read)"]
    unknown = [name for name, value in counters if value is None]
    return [f"{', '.join(unknown)} (not exported by /metrics)"] if unknown else []


def check_totals(
    asked: Sequence[RequestRecord] | Sequence[AnswerRecord], counters: ServerCounters | None, what: str
) -> list[Finding]:
    """Compare the server's totals over a window with what the client counted.

    Args:
        asked: Every request of the window.
        counters: The server's counters over it.
        what: What the requests are called.

    Returns:
        `prompt_tokens_mismatch` and `output_tokens_mismatch`; nothing where a total is not known, because a request
        failed (`incomplete_requests` says so) or a counter is missing.
    """
    if counters is None or any(one.error is not None for one in asked):
        return []
    findings = []
    for code, name, counted, own in (
        ("prompt_tokens_mismatch", "prompt", counters.prompt_tokens, [one.prompt_tokens for one in asked]),
        ("output_tokens_mismatch", "output", counters.generation_tokens, [one.output_tokens for one in asked]),
    ):
        known = [tokens for tokens in own if tokens is not None]
        if counted is None or len(known) < len(own) or counted == sum(known):
            continue
        findings.append(
            Finding(
                code=code,
                message=f"the server did other work than the client asked for: /metrics counted {counted:.0f} {name} "
                f"tokens, the client {sum(known)} in {len(own)} {what}",
                hint="more: other traffic reached the server; fewer: answers that the engine did not compute",
            )
        )
    return findings


def _check_compilation(cell: CellRecord) -> Finding | None:
    seen = cell.compilation
    if seen is None or not (seen.lines_total or seen.files_total):
        return None
    parts = []
    if seen.lines_total:
        parts.append(f"{seen.lines_total} log line(s), for example {seen.lines[0]!r}")
    if seen.files_total:
        parts.append(f"{seen.files_total} new file(s) in the compile caches, for example {seen.files[0]}")
    return Finding(
        code="jit_in_window",
        message=f"compiled while it was measured: {'; '.join(parts)}",
        hint="raise num_warmups (0 is none); if it stays, warm up the shape that the line names in a workload before it",
    )


def _check_host(cell: CellRecord) -> Finding | None:
    host = cell.host
    if host is None or max(host.other_cpus, host.stolen_cpus) <= OTHER_CPUS_LIMIT:
        return None
    told = [f"other processes used {host.other_cpus:.1f}"] if host.other_cpus > OTHER_CPUS_LIMIT else []
    if host.stolen_cpus > OTHER_CPUS_LIMIT:
        told.append(f"the hypervisor gave others {host.stolen_cpus:.1f}")
    return Finding(
        code="host_busy",
        message=f"{' and '.join(told)} of {host.cpus} CPUs meanwhile (told from {OTHER_CPUS_LIMIT})",
        hint="let nothing else run: a server that its CPU holds back is slowed by its neighbours",
    )


def _unknown_of_compilation(cell: CellRecord) -> list[str]:
    return ["late compiling (not looked at)"] if cell.compilation is None else cell.compilation.not_checked


def _not_checked(parts: Sequence[str]) -> Finding | None:
    if not parts:
        return None
    return Finding(
        code="not_checked",
        message=f"not checked: {'; '.join(parts)}",
        hint="take it as unknown, not as well",
    )


def check_answer_totals(runs: Sequence[AccuracyRun], workload: str, records: Sequence[AnswerRecord]) -> list[Finding]:
    """The same for the questions of a gsm8k workload, and `not_checked` where the server's counters are unknown."""
    run = next((run for run in runs if run.workload == workload), None)
    if run is None:
        return []
    totals = [name for name in ("prompt_tokens", "generation_tokens") if getattr(run.counters, name, None) is None]
    unknown = _not_checked([f"the server's totals over the questions ({', '.join(totals)} unknown)"] if totals else [])
    # Answers that are missing or doubled are told by check_accuracy, and make every total wrong.
    whole = {record.doc_id for record in records} == set(run.doc_ids) and len(records) == len(run.doc_ids)
    return [*(check_totals(records, run.counters, "questions") if whole else []), *([unknown] if unknown else [])]


def check_accuracy(records: Sequence[AnswerRecord], expected_ids: Collection[int]) -> list[Finding]:
    """Check that every expected question has one usable answer.

    Returns:
        `incomplete_requests` for missing, repeated, foreign or failed answers, `accuracy_truncated` where more than
        `TRUNCATION_LIMIT` of the answers hit the token limit. None is fatal.
    """
    counts = Counter(record.doc_id for record in records)
    expected = set(expected_ids)
    findings = []
    missing = expected - counts.keys()
    if missing:
        message = f"incomplete {len(expected) - len(missing)}/{len(expected)}: no answer for questions {_some(missing)}"
        hint = "the launch ended early or lines were lost; rerun it with --resume"
        findings.append(Finding(code="incomplete_requests", message=message, hint=hint))
    odd = {doc_id for doc_id, count in counts.items() if count > 1} | (counts.keys() - expected)
    if odd:
        message = f"answered more than once or never asked: questions {_some(odd)} ({len(odd)} of {len(counts)})"
        hint = "the file mixes two runs; rerun this launch into a fresh folder"
        findings.append(Finding(code="incomplete_requests", message=message, hint=hint))
    failed = [record for record in records if record.state == "error"]
    if failed:
        ids = _some({record.doc_id for record in failed})
        message = (
            f"{len(failed)} of {len(records)} requests failed, 0 allowed: questions {ids}; first: {failed[0].error}"
        )
        hint = "see the server's log at that time; failed requests are in no score"
        findings.append(Finding(code="incomplete_requests", message=message, hint=hint))
    cut = [record for record in records if record.state == "truncated"]
    if records and len(cut) / len(records) > TRUNCATION_LIMIT:
        message = (
            f"{len(cut)} of {len(records)} answers hit the token limit ({len(cut) / len(records):.1%}, "
            f"limit {TRUNCATION_LIMIT:.0%}); they count neither right nor wrong"
        )
        hint = "raise max_tokens, or check that the model ends its turn (chat template, end-of-text token)"
        findings.append(Finding(code="accuracy_truncated", message=message, hint=hint))
    return findings


def _some(ids: Collection[int]) -> str:
    shown = ", ".join(str(doc_id) for doc_id in sorted(ids)[:10])
    return f"{shown}, ..." if len(ids) > 10 else shown
