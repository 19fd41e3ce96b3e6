"""Before the benchmark measures: what the peers would compile one by one is compiled many at a time, in their own caches.

humming compiles with NVRTC or nvcc, and threads wait for that. gemlite's kernels are Triton's, compiled for each of its
candidates when that is first timed: processes compile them before.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import torch

from pq2 import format as pq2_format
from pq2.format import GROUP
from pq2.peers import Gemlite, Humming, Peer, first_line, tell

TILES = (1, 4, 16, 32, 63, 64, 128)
"""Numbers of rows at which gemlite changes its kernels and tiles."""
PROCESSES = 16
"""At most: each has a context on the GPU."""
Product = tuple[int, int, int]
"""N, K, and the number of rows."""


def humming_jobs(peers: Sequence[Humming], products: Sequence[Product]) -> list[Callable[[], object]]:
    """What compiles the kernels of some products, and those that quantise for them."""
    from humming.config import ProcessInputProblemConfig
    from humming.kernel.humming import HummingKernel
    from humming.kernel.process_input import ProcessInputKernel
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config
    from humming.tune import get_heuristics_config
    from humming.tune.process_input import get_process_input_tuning_intervals

    def config_of(peer: Humming, n: int, k: int) -> Any:
        group = peer.inputs.get("group_size", 0)
        inputs = HummingInputSchema(a_dtype=peer.inputs["dtype"], input_scale_group_size=group)
        # For floating activations humming turns our codes into signs and magnitudes.
        kind = "uint2" if inputs.a_dtype.is_integer_type else "float2e0m1"
        weights = HummingWeightSchema(b_dtype=kind, weight_scale_group_size=GROUP)
        return prepare_layer_config(n, k, weights, inputs, torch_dtype=torch.bfloat16, device=0)

    def product(peer: Humming, n: int, k: int, m: int) -> None:
        config = config_of(peer, n, k)
        tuning = json.dumps(get_heuristics_config(config, shape_m=m, device=0))
        HummingKernel.prepare_kernels(config.to_str(), None, tuning, 0)

    def quantising(peer: Humming, n: int, k: int) -> None:
        config = config_of(peer, n, k)
        if config.has_input_scale:
            problem = ProcessInputProblemConfig(
                input_dtype=config.c_dtype, hidden_size=k, quant_mode=config.input_quant_mode,
                quant_dtype=config.a_dtype, quant_group_size=config.input_scale_group_size or None,
                group_scale_dtype=config.as_dtype,
            )  # fmt: skip
            ProcessInputKernel.prepare_kernels(problem, get_process_input_tuning_intervals(problem), 0)

    jobs: list[Callable[[], object]] = []
    for peer in peers:
        jobs += [functools.partial(product, peer, *one) for one in products]
        jobs += [functools.partial(quantising, peer, n, k) for k, n in {k: n for n, k, _ in products}.items()]
    return jobs


def compile_humming(peers: Sequence[Peer], products: Sequence[Product]) -> list[str]:
    """Compile what humming launches, in threads that wait for its compilers: what went wrong."""
    mine = [peer for peer in peers if isinstance(peer, Humming)]
    if not mine:
        return []
    with contextlib.redirect_stdout(sys.stderr), ThreadPoolExecutor(os.cpu_count()) as threads:
        return [said for said in threads.map(_attempt, humming_jobs(mine, products)) if said]


def _attempt(job: Callable[[], object]) -> str | None:
    try:
        job()
    except Exception as error:
        return first_line(error)
    return None


def _candidates_of(job: tuple[Gemlite, Product]) -> str | None:
    """In a process of its own: compile gemlite's candidates for a product, time none. What went wrong, or None."""
    peer, (n, k, m) = job

    def candidates() -> None:
        from triton.runtime.autotuner import Autotuner

        def run(self: Any, *arguments: Any, **options: Any) -> None:
            self.nargs = dict(zip(self.arg_names, arguments, strict=False))
            for config in self.prune_configs(options):
                self.fn.run(*arguments, **{**options, "warmup": True}, **config.all_kwargs())

        Autotuner.run = run
        weight = pq2_format.random(n, k, "cuda")
        x = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
        peer.prepare([weight], x).calls[peer.name](0)

    return _attempt(candidates)


def gemlite_jobs(peers: Sequence[Gemlite], products: Sequence[Product]) -> list[tuple[Gemlite, Product]]:
    """Products that between them launch all candidates: others launch those of one that is alike."""
    # Triton tells multiples of 16 from others.
    alike = {(n, k, bisect.bisect_left(TILES, m), m % 16 == 0): (n, k, m) for n, k, m in products}
    return [(peer, product) for peer in peers for product in alike.values()]


def compile_gemlite(peers: Sequence[Peer], products: Sequence[Product]) -> list[str]:
    """Compile what gemlite chooses from, in processes; without a GPU nothing. What went wrong."""
    jobs = gemlite_jobs([peer for peer in peers if isinstance(peer, Gemlite)], products)
    if not jobs or not torch.cuda.is_available():
        return []
    workers = min(os.cpu_count() or 1, PROCESSES)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as processes:
        return [said for said in processes.map(_candidates_of, jobs) if said]


def compile_all(peers: Sequence[Peer], products: Sequence[Product]) -> int:
    """Compile what peers will launch: how much failed. It is told, and met again where that peer is prepared."""
    failed: list[str] = []
    if not peers:
        return 0
    for whose, compile_some in (("humming", compile_humming), ("gemlite", compile_gemlite)):
        begin = time.monotonic()
        try:
            failed += compile_some(peers, products)
        except Exception as error:
            failed.append(first_line(error))
        tell(f"{whose}'s kernels: {time.monotonic() - begin:.0f} s")
    for said in dict.fromkeys(failed):
        tell(f"not compiled: {said}")
    return len(failed)
