"""How fast traces are read and in how much memory, beside `json.load` of the whole file: ratios, on one machine.

    python -m tests.benchmarks.traces [--megabytes 200] [--file TRACE.json[.gz]]

Each reader runs in a process of its own; memory is its peak above that of a process that imports the same and reads
nothing. Without `--file` a trace of decode steps is written, with the sizes of events that torch's profiler gives them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.traces import Ran, decode, event, kineto_events, kineto_text

NAMES = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)",
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT",
    "triton_per_fused_fused_add_rms_norm_2",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(long)",
]
KERNELS_A_STEP = 350
OPERATORS_A_STEP = 300

READERS = {
    "nothing": "pass",
    "read_trace": "trace = read_trace(path); print(len(trace.kernels), file=sys.stderr)",
    "json.load": "whole = json.load(gzip.open(path) if path.suffix == '.gz' else path.open('rb'))",
}
PROGRAM = """
import gzip, json, resource, sys, time
from pathlib import Path
from abharness.trace import read_trace
path = Path(sys.argv[1])
started = time.perf_counter()
{body}
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def write_trace(path: Path, megabytes: int) -> None:
    """A trace of equal decode steps, step by step, so that writing takes no memory either."""
    one = decode(1, *(Ran(NAMES[place % len(NAMES)], graph=place > 20) for place in range(KERNELS_A_STEP)))
    events = kineto_events([one])
    for each in events:
        if each.get("cat") == "kernel":
            each["args"] |= {"queued": 0, "registers per thread": 32, "shared memory": 0, "blocks per SM": 0.007576,
                             "warps per SM": 0.030303, "grid": [1, 1, 1], "block": [128, 1, 1],
                             "est. achieved occupancy %": 0}  # fmt: skip
    operator = event("cpu_op", "aten::empty_strided", events[1]["ts"], 1.5, **{"External id": 1, "Ev Idx": 1})
    text = kineto_text([*events, *[operator] * OPERATORS_A_STEP])
    head, body, tail = text.partition("[\n")[0] + "[\n", text.partition("[\n")[2].rpartition("\n  ],")[0], "\n  ],"
    end = text.rpartition("\n  ],")[2]
    with path.open("w") as file:
        file.write(head + body)
        while file.tell() < megabytes * 10**6:
            file.write(",\n  " + body)
        file.write(tail + end)


def measure(name: str, path: Path) -> tuple[float, float]:
    """Seconds and peak bytes of one reader."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=READERS[name]), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peak = done.stdout.split()
    return float(seconds), float(peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "trace.json"
        if arguments.file is None:
            write_trace(path, arguments.megabytes)
        size = path.stat().st_size
        idle = measure("nothing", path)[1]
        results = {name: measure(name, path) for name in ("read_trace", "json.load")}
        print(f"{path.name}: {size / 1e6:.0f} MB")
        print(f"{'':12}{'MB/s':>8}{'peak MB':>10}{'speed':>8}{'memory':>8}   (ratios to json.load)")
        whole_s, whole_peak = results["json.load"]
        for name, (seconds, peak) in results.items():
            ratios = f"{whole_s / seconds:8.2f}{(peak - idle) / (whole_peak - idle):8.3f}"
            print(f"{name:12}{size / 1e6 / seconds:8.1f}{(peak - idle) / 1e6:10.0f}{ratios}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
