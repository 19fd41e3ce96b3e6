"""Every kernel compiled ahead of time for two architectures: the instructions that matter, registers and spills."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@functools.cache
def _compiled(arch: int) -> dict:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, script, str(arch)], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _count(kernel: dict, *starts: str) -> int:
    return sum(count for word, count in kernel["instructions"].items() if word.startswith(starts))


@pytest.mark.parametrize("arch", [86, 90])
def test_nothing_spills(arch: int) -> None:
    kernels = _compiled(arch)
    families = {name.split()[0] for name in kernels}
    assert families >= {"quantize", "single", "legacy", "legacy_single", "small_gemm", "embedding"}
    assert {name: (kernel["local"], kernel["stack"]) for name, kernel in kernels.items()} == dict.fromkeys(
        kernels, (0, 0)
    )
    assert all(kernel["registers"] <= 255 for kernel in kernels.values())


@pytest.mark.parametrize("arch", [86, 90])
def test_single_multiplies_codes_as_they_lie(arch: int) -> None:
    kernels = {name: kernel for name, kernel in _compiled(arch).items() if name.startswith("single")}
    assert len(kernels) > 5
    for name, kernel in kernels.items():
        words = _count(kernel, "dp4a") // 4
        assert words, name
        # Four DP4A a word, four masks, three shifts: nothing looks a code up, and nothing is moved between lanes but sums.
        assert _count(kernel, "prmt") == 0, name
        assert _count(kernel, "dp4a") == 4 * words, name
        assert 4 * words <= _count(kernel, "and.b32") < 5 * words + 16, name
        assert 3 * words <= _count(kernel, "shr.u32") < 4 * words, name
        assert _count(kernel, "ld.global.L1::evict_first") == words / 4, name  # 16 bytes of codes a load


@pytest.mark.parametrize("arch", [86, 90])
def test_legacy_looks_codes_up(arch: int) -> None:
    kernel = _compiled(arch)["legacy_single"]
    words = _count(kernel, "dp4a") // 4
    assert _count(kernel, "prmt") == 8 * words > 0  # four lookups and four sortings by plane


@pytest.mark.parametrize("arch", [86, 90])
@pytest.mark.parametrize("m", [16, 32, 64, 128])
def test_legacy_tiles_run_on_tensor_cores(arch: int, m: int) -> None:
    kernel = _compiled(arch)[f"legacy {m}"]
    wide = arch >= 90 and m >= 64
    assert _count(kernel, "wgmma.mma_async" if wide else "mma.sync.aligned.m16n8k32") > 0
    assert _count(kernel, "dp4a") == 0


@pytest.mark.parametrize("arch", [86, 90])
def test_small_gemm_counts_arrivals_with_an_atomic(arch: int) -> None:
    kernel = _compiled(arch)["small_gemm"]
    assert _count(kernel, "mma.sync.aligned.m16n8k16") > 0
    assert _count(kernel, "atom") == _count(kernel, "atom.global.gpu.acq_rel.add") == 1
    # Partial sums of other multiprocessors are read past the L1 cache, all of them: as many as are written.
    assert _count(kernel, "ld.global.cg") == _count(kernel, "st.global.b32") - 1 > 0  # and the counter, back to zero
