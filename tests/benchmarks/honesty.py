"""Whether the client tells what `vllm bench serve` tells: both on one running server, same shapes, in turn.

    python -m tests.benchmarks.honesty --base-url http://127.0.0.1:8000 --model NAME --tokenizer FOLDER
        [--vllm-python PATH] [--rounds 3] [--shapes 512:128:1:8,512:128:16:64] [--json FILE]

A shape is input_len:output_len:max_concurrency:num_prompts. Prints the median over the rounds of each metric, the range
over the rounds as noise, and the ratio of the two clients. Each run sends prompts that no other run sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from abharness import endpoints, metrics
from abharness.loadgen import run_cell
from abharness.prompts import build_prompts
from tests.benchmarks.bench_serve import Shape, bench_serve

THEIRS = {
    "output_throughput": "output_throughput",
    "ttft": "median_ttft_ms",
    "tpot": "median_tpot_ms",
    "itl": "median_itl_ms",
}
"""Our metric -> the key of `vllm bench serve`."""

Values = dict[str, float]


def ours(base_url: str, model: str, pool: Sequence[int], shape: Shape, first_ordinal: int) -> Values:
    """One cell of ours; seconds and tokens a second."""
    prompts = build_prompts(
        pool,
        seed=0,
        label=f"honesty {shape}",
        num_prompts=shape.num_prompts,
        input_len=shape.input_len,
        first_ordinal=first_ordinal,
    )
    traffic = run_cell(
        base_url=base_url,
        served_model=model,
        prompts=prompts,
        output_len=shape.output_len,
        max_concurrency=shape.max_concurrency,
        request_timeout_s=600,
        alive=lambda: None,
    )
    done = metrics.ok(traffic.requests)
    if len(done) < shape.num_prompts:
        raise SystemExit(f"{shape.num_prompts - len(done)} requests failed: {traffic.requests[0].error}")
    times = {
        "ttft": [value for request in done if (value := metrics.ttft_s(request)) is not None],
        "tpot": [value for request in done if (value := metrics.tpot_s(request)) is not None],
        "itl": [request.itl_p50_s for request in done if request.itl_p50_s is not None],
    }
    output = sum(request.output_tokens or 0 for request in done)
    return {
        "output_throughput": output / (traffic.ended_s - traffic.started_s),
        **{name: statistics.median(values) for name, values in times.items() if values},
        "prompt_tokens": sum(request.prompt_tokens or 0 for request in done),
    }


def theirs(python: str, base_url: str, model: str, tokenizer: str, shape: Shape, seed: int) -> Values:
    """The same by `vllm bench serve`."""
    result = bench_serve(python, base_url, model, tokenizer, shape, seed=seed)
    found = {name: float(result[key]) / (1e3 if key.endswith("_ms") else 1) for name, key in THEIRS.items()}
    return {**found, "prompt_tokens": float(result["total_input_tokens"])}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="512:128:1:8,512:128:16:64")
    parser.add_argument("--json", type=Path, help="write every value there")
    args = parser.parse_args(argv)
    pool = endpoints.token_pool(args.base_url, args.model).tokens
    ordinal = 0
    record: dict[str, dict[str, list[Values]]] = {}
    for text in args.shapes.split(","):
        shape = Shape(*map(int, text.split(":")))
        runs: dict[str, list[Values]] = {"abharness": [], "vllm bench serve": []}
        for number in range(-1, args.rounds):
            # The round before the first is a warm-up of both; the order alternates, so that drift is nobody's.
            for name in list(runs)[:: 1 if number % 2 else -1]:
                if name == "abharness":
                    found = ours(args.base_url, args.model, pool, shape, ordinal)
                    ordinal += shape.num_prompts
                else:
                    found = theirs(
                        args.vllm_python, args.base_url, args.model, args.tokenizer, shape, seed=1000 + ordinal
                    )
                if number >= 0:
                    runs[name].append(found)
        record[text] = runs
        print(f"input_len={shape.input_len} output_len={shape.output_len} max_concurrency={shape.max_concurrency}")
        for metric in runs["abharness"][0]:
            values = [[run[metric] for run in part] for part in runs.values()]
            medians = [statistics.median(part) for part in values]
            noise = [
                f"{(max(part) - min(part)) / 2 / median:.1%}" for part, median in zip(values, medians, strict=True)
            ]
            shown = "  ".join(f"{median:>12.5g} \u00b1 {part:>6}" for median, part in zip(medians, noise, strict=True))
            print(f"  {metric:20}{shown}  ratio {medians[0] / medians[1]:.3f}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
