"""Runs every kernel once on sizes that fit nothing, on a GPU: `compute-sanitizer --tool memcheck python3 memcheck.py`.

So does `--tool racecheck`, for what warps share.
"""

import torch

from pq2 import dispatch, embedding, launches, small_gemm, switches
from pq2 import format as pq2_format

ENTRIES = {
    1: [
        launches.Entry("single_ring", launches.SingleRing(8, 16, 2, 1, 3, 1)),
        launches.Entry("single_ring", launches.SingleRing(4, 16, 1, 2, 2, 1)),
    ],
    7: [
        launches.Entry("ring", launches.Ring(16, 4, 1, 2, 3, 1, 1, 0, 1)),
        launches.Entry("ring", launches.Ring(32, 4, 2, 3, 2, 0, 1, 0, 1)),
        launches.Entry("direct", launches.Direct(64, 1, 4, 2)),
    ],
    13: [
        launches.Entry("ring", launches.Ring(16, 4, 1, 1, 4, 2, 3, 0, 1)),
        launches.Entry("direct", launches.Direct(16, 8, 1, 2)),
    ],
    100: [
        launches.Entry("prefill", launches.Prefill(32, 64, 1, 4, 3, 2)),
        launches.Entry("prefill_wgmma", launches.PrefillWgmma(32, 2, 4, 1, 3, 2, 1)),
        launches.Entry("prefill_wgmma", launches.PrefillWgmma(64, 1, 3, 2, 1, 1, 2)),
    ],
}
"""What the dispatch would not take for weights as small as these. One program a multiprocessor takes several tiles."""


def main() -> None:
    """Every path, odd sizes; what the tool finds is its own exit status."""
    for n, k in ((1, 128), (37, 384), (130, 1152), (261, 2048)):
        weight = pq2_format.random(n, k, "cuda")
        signs = torch.ones(k, dtype=torch.int8, device="cuda")
        rotation = 1024 if k % 1024 == 0 else 0
        for given in ({}, {"PQ2_KERNELS": "exact"}, {"PQ2_KERNELS": "legacy"}):
            choice = switches.resolve(given, "cuda")
            for m in (1, 2, 9, 17, 33, 65, 130):
                x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
                dispatch.matmul(x, weight, choice, signs, rotation)
        ids = torch.randint(0, n, (7,), device="cuda")
        embedding.lookup(ids, weight, torch.bfloat16, signs, rotation)
        dense = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
        arrived = small_gemm.counters(n, dense.device)
        for m in (1, 3, 16):
            small_gemm.small_gemm(torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), dense, arrived, None)
    for n, k in ((4001, 1024), (2113, 3072)):
        weight = pq2_format.random(n, k, "cuda")
        for m, entries in ENTRIES.items():
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            for entry in entries:
                dispatch.run(entry, x, weight, torch.empty(m, n, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    print("every kernel has run:", dict(dispatch.CALLS))


if __name__ == "__main__":
    main()
