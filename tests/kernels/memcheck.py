"""Runs every kernel once on sizes that fit nothing: `compute-sanitizer --tool memcheck python3 memcheck.py`, on a GPU."""

import torch

from pq2 import dispatch, embedding, small_gemm, switches
from pq2 import format as pq2_format


def main() -> None:
    """Every path, odd sizes; what the tool finds is its own exit status."""
    for n, k in ((1, 128), (37, 384), (130, 1152), (261, 2048)):
        weight = pq2_format.random(n, k, "cuda")
        signs = torch.ones(k, dtype=torch.int8, device="cuda")
        rotation = 1024 if k % 1024 == 0 else 0
        for kernel_set in ("tuned", "exact", "legacy"):
            choice = switches.resolve({"PQ2_KERNELS": kernel_set}, "cuda")
            for m in (1, 2, 17, 33, 65, 130):
                x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
                dispatch.matmul(x, weight, choice, signs, rotation)
        ids = torch.randint(0, n, (7,), device="cuda")
        embedding.lookup(ids, weight, torch.bfloat16, signs, rotation)
        dense = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
        arrived = small_gemm.counters(n, dense.device)
        for m in (1, 3, 16):
            small_gemm.small_gemm(torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), dense, arrived, None)
    torch.cuda.synchronize()
    print("every kernel has run:", dict(dispatch.CALLS))


if __name__ == "__main__":
    main()
