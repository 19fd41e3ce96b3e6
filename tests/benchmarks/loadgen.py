"""How fast and how exact the load generator is, beside `vllm bench serve` on the same mock server.

    python -m tests.benchmarks.loadgen [--vllm-python PATH] [--streams 16] [--chunks 1024] [--rounds 3]

Prints chunks per second (a token a chunk, full speed), the error of TTFT (the client's first token minus the moment at
which the server handed that chunk to its socket), and what both clients tell of a server that keeps its pace. Client and
server are pinned to a core each where there are two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from abharness import metrics
from abharness.loadgen import CellTraffic, run_cell
from abharness.prompts import build_prompts
from abharness.sse import quantile
from tests.benchmarks.bench_serve import Shape, bench_serve

MOCK_SERVER = Path(__file__).with_name("mock_server.py")
INPUT_LEN = 64


@contextlib.contextmanager
def mock_server(pace_s: float, core: int | None) -> Iterator[str]:
    """A mock server in its own process, on its own core; yields its base URL."""
    process = subprocess.Popen(
        [sys.executable, str(MOCK_SERVER), "--pace-s", str(pace_s)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def measure(base_url: str, *, streams: int, chunks: int, waves: int, first_ordinal: int) -> tuple[CellTraffic, float]:
    """One cell against the mock: its traffic, and the wall seconds of the whole call, parsing included."""
    prompts = build_prompts(
        range(1000, 2000),
        seed=0,
        label="benchmark",
        num_prompts=streams * waves,
        input_len=INPUT_LEN,
        first_ordinal=first_ordinal,
    )
    started_s = time.monotonic()
    traffic = run_cell(
        base_url=base_url,
        served_model="mock",
        prompts=prompts,
        output_len=chunks,
        max_concurrency=streams,
        request_timeout_s=600,
        alive=lambda: None,
    )
    wall_s = time.monotonic() - started_s
    assert all(request.error is None for request in traffic.requests), traffic.requests[0].error
    return traffic, wall_s


def ttft_errors_s(base_url: str, traffic: CellTraffic, first_ordinal: int) -> list[float]:
    """First token as the client saw it minus the server's first write, per request."""
    with urllib.request.urlopen(f"{base_url}/first_writes") as response:
        first_writes = json.load(response)
    pool = range(1000, 2000)
    errors = []
    for request in traffic.requests:
        ordinal = first_ordinal + request.index
        key = ",".join(str(pool[ordinal // 1000**digit % 1000]) for digit in range(4))
        assert request.first_token_s is not None
        errors.append(request.first_token_s - first_writes[key])
    return errors


def write_tokenizer(folder: Path) -> None:
    """The smallest tokeniser that `vllm bench serve` accepts: 2,000 words."""
    vocab = {f"w{n}": n for n in range(2000)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    parts = {"added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 100_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def vllm_bench(python: str, base_url: str, *, streams: int, chunks: int, waves: int) -> dict[str, Any]:
    """What `vllm bench serve` tells."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        shape = Shape(INPUT_LEN, chunks, streams, streams * waves)
        return bench_serve(python, base_url, "mock", name, shape, seed=0)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="interpreter that has vLLM; without it that row is left out")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=1024)
    parser.add_argument("--waves", type=int, default=4, help="requests per stream slot at full speed")
    parser.add_argument("--rounds", type=int, default=3, help="repeats, alternating between the clients")
    parser.add_argument("--pace-s", type=float, default=0.010, help="seconds between chunks of the paced streams")
    args = parser.parse_args(argv)

    before = os.sched_getaffinity(0)
    cores = sorted(before)
    client_core, server_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    if client_core is not None:
        os.sched_setaffinity(0, {client_core})
        print(f"client on core {client_core}, server on core {server_core}")
    else:
        print("one core only: client and server share it, nothing is pinned")
    try:
        run(args, server_core)
    finally:
        os.sched_setaffinity(0, before)


def run(args: argparse.Namespace, server_core: int | None) -> None:
    """Measure and print."""
    shape = {"streams": args.streams, "chunks": args.chunks, "waves": args.waves}
    timed, whole, shares, theirs, errors = [], [], [], [], []
    with mock_server(0.0, server_core) as base_url:
        for number in range(args.rounds):
            first_ordinal = number * args.streams * args.waves
            traffic, wall_s = measure(base_url, first_ordinal=first_ordinal, **shape)
            count = sum(request.chunks for request in traffic.requests)
            timed.append(count / (traffic.ended_s - traffic.started_s))
            whole.append(count / wall_s)
            shares.append(traffic.client.cpu_share)
            errors += ttft_errors_s(base_url, traffic, first_ordinal)
            if args.vllm_python:
                theirs.append(vllm_bench(args.vllm_python, base_url, **shape)["output_throughput"])
    with mock_server(args.pace_s, server_core) as base_url:
        shape["chunks"] = min(args.chunks, 256)
        paced, _ = measure(base_url, first_ordinal=0, **shape)
        paced_errors = ttft_errors_s(base_url, paced, 0)
        their_paced = vllm_bench(args.vllm_python, base_url, **shape) if args.vllm_python else None

    print(f"{args.streams} streams x {args.chunks} chunks, full speed, median of {args.rounds} rounds")
    ours = statistics.median(timed)
    print(f"  {'abharness, timed window':34}{ours:>10.0f} chunks/s   ({statistics.median(shares):.2f} of a core)")
    print(f"  {'abharness, with parsing after it':34}{statistics.median(whole):>10.0f} chunks/s")
    if theirs:
        reference = statistics.median(theirs)
        print(f"  {'vllm bench serve':34}{reference:>10.0f} chunks/s")
        print(f"  {'ratio, timed window / with parsing':34}{ours / reference:>10.2f} / ", end="")
        print(f"{statistics.median(whole) / reference:.2f}")
    else:
        print(f"  {'vllm bench serve':34}   skipped: no --vllm-python")
    print("TTFT error, client's first token minus server's first write, p50 and p99")
    rate = args.streams / args.pace_s
    for name, values in ((f"paced, {rate:.0f} chunks/s in all", paced_errors), ("full speed", errors)):
        print(f"  {name:34}{quantile(values, 0.5) * 1e3:>10.3f} ms{quantile(values, 0.99) * 1e3:>10.3f} ms")
    load = paced.client
    print(
        f"paced: {load.cpu_share:.2f} of a core, loop lag p50 {load.loop_lag_p50_s * 1e3:.2f} ms, "
        f"p99 {load.loop_lag_p99_s * 1e3:.2f} ms"
    )
    if their_paced is not None:
        told = [[metrics.ttft_s(request), metrics.tpot_s(request)] for request in paced.requests]
        ttft, tpot = (
            statistics.median(value for value in column if value is not None) for column in zip(*told, strict=True)
        )
        print(f"paced, a chunk each {args.pace_s * 1e3:g} ms, medians: TTFT abharness {ttft * 1e3:.2f} ms, "
              f"vllm bench serve {their_paced['median_ttft_ms']:.2f} ms; TPOT {tpot * 1e3:.3f} and "
              f"{their_paced['median_tpot_ms']:.3f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
