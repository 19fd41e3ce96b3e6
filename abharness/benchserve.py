"""A cell of a launch -> the JSON that `vllm bench serve` writes for a benchmark, for the tools that read it.

Keys, units (milliseconds in keys that end in `_ms`, else seconds) and percentile names are those of vLLM 0.32
(`vllm/benchmarks/serve.py`). What a record does not hold is null: the gaps between tokens are kept by request as median
and 99th percentile, so only their mean over all of them is known. What is ours stands apart under `abharness`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from abharness import metrics
from abharness.exported import Document, Exported, file_name, launch_name, started
from abharness.record import CellRecord, RequestRecord
from abharness.runs import CellKey, Launch


def documents(exported: Exported) -> Iterator[Document]:
    """One file a launch, cell and repeat."""
    for launch in exported.launches():
        folder = exported.folder / launch_name(launch)
        for cell in launch.record.cells:
            name = (
                f"{file_name(cell.workload)}-in{cell.input_len}-out{cell.output_len}-c{cell.max_concurrency}"
                f"-r{cell.repeat}.json"
            )
            data = result(exported, launch, cell)
            yield Document(PurePosixPath(folder, name), json.dumps(data, indent=1, allow_nan=False) + "\n")


def result(exported: Exported, launch: Launch, cell: CellRecord) -> dict[str, Any]:
    """The keys of one benchmark."""
    key = CellKey.of(cell)
    requests = launch.requests.get((key, cell.repeat), [])
    codes = exported.codes(key)
    return {
        "date": None if (when := started(launch)) is None else when.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": f"{exported.run.record.experiment}/{launch.record.variant}",
        "model_id": launch.record.model,
        "tokenizer_id": None,  # prompts are token ids: no tokenizer of ours had a part in it
        "num_prompts": len(requests),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": cell.max_concurrency,
        **_totals(cell, requests),
        **_times(requests),
        "abharness": {
            "valid": not codes,
            "codes": codes,
            "experiment": exported.run.record.experiment,
            "run": str(exported.run.path),
            "launch": launch.record.launch_index,
            "variant": launch.record.variant,
            "workload": cell.workload,
            "kind": cell.kind,
            "input_len": cell.input_len,
            "output_len": cell.output_len,
            "repeat": cell.repeat,
            "metrics": metrics.cell_metrics(cell, requests),
        },
    }


def _totals(cell: CellRecord, requests: Sequence[RequestRecord]) -> dict[str, Any]:
    done = metrics.ok(requests)
    duration = cell.ended_s - cell.started_s
    prompt = sum(request.prompt_tokens or 0 for request in done)
    output = sum(request.output_tokens or 0 for request in done)

    def rate(amount: float) -> float | None:
        return amount / duration if done and duration > 0 else None

    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": rate(len(done)),
        "request_goodput": None,
        "output_throughput": rate(output),
        "total_token_throughput": rate(prompt + output),
        "input_lens": [request.prompt_tokens for request in requests],
        "output_lens": [request.output_tokens if request.error is None else 0 for request in requests],
        "ttfts": [metrics.ttft_s(request) for request in requests],
        "latencies": [metrics.e2el_s(request) for request in requests],
        "start_times": [request.sent_s for request in requests],
        "errors": [request.error or "" for request in requests],
        "max_output_tokens_per_s": None,
        "max_concurrent_requests": None,
    }


def _times(requests: Sequence[RequestRecord]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, of in (("ttft", metrics.ttft_s), ("tpot", metrics.tpot_s), ("e2el", metrics.e2el_s)):
        values = [value for value in map(of, metrics.ok(requests)) if value is not None]
        found |= {
            f"mean_{name}_ms": math.fsum(values) / len(values) * 1e3 if values else None,
            f"median_{name}_ms": statistics.median(values) * 1e3 if values else None,
            f"std_{name}_ms": statistics.pstdev(values) * 1e3 if values else None,
            f"p99_{name}_ms": None if (p99 := metrics.percentile(values, 0.99)) is None else p99 * 1e3,
        }
    gaps = {"median_itl_ms": None, "std_itl_ms": None, "p99_itl_ms": None}
    return {**found, "mean_itl_ms": _mean_gap_ms(requests), **gaps}


def _mean_gap_ms(requests: Sequence[RequestRecord]) -> float | None:
    """The mean over all gaps between chunks: that of a request is known from its ends and their count."""
    spans, gaps = 0.0, 0
    for request in metrics.ok(requests):
        if request.first_token_s is None or request.last_token_s is None:
            return None
        spans += request.last_token_s - request.first_token_s
        gaps += max(0, request.chunks - 1)
    return spans / gaps * 1e3 if gaps else None
