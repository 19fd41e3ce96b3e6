"""Every kernel compiled ahead of time for two architectures: the instructions that matter, registers and spills."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton


@functools.cache
def _compiled(arch: int) -> dict:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, script, str(arch)], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _count(kernel: dict, *starts: str) -> int:
    return sum(count for word, count in kernel["instructions"].items() if word.startswith(starts))


PINNED = triton.__version__.startswith("3.6.")
"""Whether this is the Triton that GPU builds of vLLM bring; a later one allocates registers in other ways."""
SPILLED = (
    {"ring": 32, "limited": 48, "prefill_wgmma": 32} if PINNED else {"ring": 96, "limited": 96, "prefill_wgmma": 160}
)
"""Bytes of a thread's that may be kept in local memory: by `ring` where it uses all 255 registers, for 16 tokens or a long
K, and where its entry limits them; by `prefill_wgmma`, of what it needs between tiles."""
SHARED = {86: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may have."""
BOTH = "ring 16 40 (32, 4, 2, 5, 2, 0, 1, 0, 1)"
"""A kernel that both architectures compile, although only one has the room to run it."""


@pytest.mark.parametrize("arch", [86, 90])
def test_nothing_spills(arch: int) -> None:
    kernels = _compiled(arch)
    families = {name.split()[0] for name in kernels}
    assert families >= {
        "quantize", "single", "single_ring", "direct", "ring", "combine", "prefill", "legacy", "legacy_single",
        "small_gemm", "embedding",
    }  # fmt: skip
    for name, kernel in kernels.items():
        assert kernel["local"] == 0, name
        assert kernel["stack"] <= _may_spill(name, kernel), name
        assert kernel["registers"] <= 255, name
        assert kernel["registers"] * kernel["warps"] * 32 <= 65536, name
        assert kernel["dynamic"] <= SHARED[arch] or name == BOTH, name


def _may_spill(name: str, kernel: dict) -> int:
    family = name.split()[0]
    if family == "ring" and "232" in name:
        return SPILLED["limited"]
    if family == "prefill_wgmma" or (family == "ring" and kernel["registers"] == 255):
        return SPILLED[family]
    return 0 if PINNED else 8


def _of(arch: int, path: str) -> dict[str, tuple[dict, list[int], int, int]]:
    """The kernels of a path: what was compiled, the fields of the launch, tokens, groups of a row."""
    found = {}
    for name, kernel in _compiled(arch).items():
        family, *rest = name.split(" ", 3)
        if family == path:
            tokens, groups, launch = rest
            found[name] = (kernel, [int(value) for value in launch.strip("()").split(",")], int(tokens), int(groups))
    assert found
    return found


@pytest.mark.parametrize("arch", [86, 90])
@pytest.mark.parametrize("path", ["direct", "ring"])
def test_code_bytes_go_into_fragments_as_they_lie(arch: int, path: str) -> None:
    for name, (kernel, launch, tokens, groups) in _of(arch, path).items():
        block_n, warps_k, warps_n, sg = launch[:4]
        split = launch[6] if path == "ring" else 1
        # `direct` has its first steps apart from the loop over the others.
        steps = -(-groups // (warps_k * split)) if path == "ring" else 2 * sg
        products = steps * (block_n // (16 * warps_n)) * (tokens // 8) * 4  # four planes a group
        assert _count(kernel, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32") == products, name
        assert _count(kernel, "ldmatrix") == 0, name
        assert _count(kernel, "prmt") == 0, name
        # A mask a word of codes and plane, three shifts, and no more than the addresses besides.
        masks = steps * (block_n // (16 * warps_n)) * 16
        assert masks <= _count(kernel, "and.b32") < masks + 40, name
        assert _count(kernel, "ld.global", "ld.shared") >= steps, name


@pytest.mark.parametrize("arch", [86, 90])
@pytest.mark.parametrize("path", ["ring", "single_ring"])
def test_weights_come_by_cp_async_and_few_barriers(arch: int, path: str) -> None:
    for name, (kernel, launch, _, groups) in _of(arch, path).items():
        assert _count(kernel, "cp.async.cg.shared.global") > 0, name  # 16 bytes, past the L1 cache
        assert _count(kernel, "cp.async.wait_group") > 0, name
        if path == "ring":
            _, warps_k, _, sg, stages, _, split, _, _ = launch
            chunks = math.ceil(math.ceil(groups / (warps_k * split)) / sg)
        else:
            chunks, stages = 1, launch[4]
        # Two a stage that is multiplied, two for sums over warps, and those of the stages that are filled first.
        assert _count(kernel, "bar.sync") <= 2 * chunks + 3 + stages, name


@pytest.mark.parametrize("arch", [86, 90])
def test_prefill_decodes_into_fragments(arch: int) -> None:
    for name, (kernel, launch, _, _) in _of(arch, "prefill").items():
        block_m, block_n, warps_m, warps_n, _, _ = launch
        tiles = block_n // (16 * warps_n)
        products = tiles * (block_m // (8 * warps_m)) * 4
        assert _count(kernel, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32") == products, name
        # Four lookups of four weights for each word of 16 codes; code bytes are read 8 at a time.
        assert _count(kernel, "prmt.b32") == 16 * tiles, name
        assert _count(kernel, "ld.shared.v2") >= 2 * tiles, name
        # Only activations go through ldmatrix: four matrices each of 8 tokens and 16 bytes.
        assert _count(kernel, "ldmatrix.sync.aligned.m8n8.x4.shared") == block_m // (8 * warps_m) * 2, name
        assert _count(kernel, "cp.async.wait_group") == 1, name


def test_prefill_on_sm_90_is_wgmma_on_what_bulk_copies_bring() -> None:
    for name, (kernel, launch, _, _) in _of(90, "prefill_wgmma").items():
        block_m, consumers, _, sg, _, _, _ = launch
        product = f"wgmma.mma_async.sync.aligned.m64n{block_m}k32.s32.s8.s8"
        assert _count(kernel, product) == 5 * sg * consumers, name  # four steps, and where they begin
        assert _count(kernel, "prmt.b32") == 16 * sg * consumers, name
        assert _count(kernel, "cp.async.bulk.tensor.2d") == 2 * sg, name
        assert _count(kernel, "cp.async.cg.shared.global") == 4 * sg * consumers, name
        assert _count(kernel, "cp.async.mbarrier.arrive.noinc") == 1 + 2 * consumers, name
        assert _count(kernel, "setmaxnreg") > 0, name
        assert _count(kernel, "ldmatrix") == 0, name
    assert not any(name.startswith("prefill_wgmma") for name in _compiled(86))


@pytest.mark.parametrize("arch", [86, 90])
def test_few_rows_are_quantised_without_a_barrier(arch: int) -> None:
    for name in ("quantize few", "quantize fragments"):
        assert _count(_compiled(arch)[name], "bar.sync") == 0, name
        assert _count(_compiled(arch)[name], "shfl.sync.bfly.b32") > 0, name  # it counts what is there


@pytest.mark.parametrize("arch", [86, 90])
def test_a_kernel_waits_for_the_one_before_it_where_launches_overlap(arch: int) -> None:
    for name, kernel in _compiled(arch).items():
        if name.split()[0] in ("quantize", "single_ring", "direct", "ring", "combine"):
            assert _count(kernel, "griddepcontrol.wait") == (arch >= 90), name
            assert _count(kernel, "griddepcontrol.launch_dependents") == (arch >= 90), name


@pytest.mark.parametrize("arch", [86, 90])
def test_a_ring_of_one_row_multiplies_codes_as_they_lie(arch: int) -> None:
    for name, (kernel, *_) in _of(arch, "single_ring").items():
        words = _count(kernel, "dp4a") // 4
        assert words, name
        assert _count(kernel, "prmt") == 0, name
        assert 4 * words <= _count(kernel, "and.b32") < 4 * words + 20, name


@pytest.mark.parametrize("arch", [86, 90])
def test_single_multiplies_codes_as_they_lie(arch: int) -> None:
    kernels = {name: kernel for name, kernel in _compiled(arch).items() if name.startswith("single ")}
    assert kernels
    for name, kernel in kernels.items():
        words = _count(kernel, "dp4a") // 4
        assert words, name
        # Four DP4A a word, four masks, three shifts: nothing looks a code up, and nothing is moved between lanes but sums.
        # (Triton 3.9 finds an address of the sums by one PRMT.)
        assert _count(kernel, "prmt") <= (0 if PINNED else 1) < words, name
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
