"""The PQ2 format: what is packed comes back, the nearest ternary matrix is found, what is damaged is refused."""

import itertools
import re

import pytest
import torch
from properties import given, seeds, st

from pq2 import format as pq2_format
from pq2.errors import FormatError


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes and scales stand for, float64."""
    return (codes.double() - 1) * scales.double().repeat_interleave(128, dim=1)


@given(st.integers(0, 5), st.integers(1, 4), seeds)
def test_what_is_packed_comes_back(n: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 3, (n, groups * 128), dtype=torch.uint8, generator=generator)
    scales = torch.randn(n, groups, generator=generator).to(torch.float16)
    blocks = pq2_format.pack(codes, scales)
    assert blocks.shape == (n, groups * 34)
    pq2_format.check_blocks(blocks)
    again, d = pq2_format.unpack(blocks)
    assert torch.equal(again, codes)
    assert torch.equal(d, scales)
    prepared = pq2_format.prepare(blocks)
    assert prepared.shape == (n, groups * 128)
    assert torch.equal(pq2_format.to_blocks(prepared), blocks)


def test_a_block_has_the_documented_bytes() -> None:
    codes = torch.ones(1, 128, dtype=torch.uint8)
    codes[0, 5] = 2  # byte 1, bits 2 and 3
    blocks = pq2_format.pack(codes, torch.tensor([[1.0]], dtype=torch.float16))
    assert blocks[0, :2].tolist() == [0x00, 0x3C]  # fp16 one, little-endian
    assert blocks[0, 2:5].tolist() == [0b01010101, 0b01011001, 0b01010101]


def test_prepared_weights_are_all_codes_and_then_all_scales() -> None:
    codes = torch.zeros(2, 256, dtype=torch.uint8)
    codes[1, 128:132] = torch.tensor([0, 1, 2, 1])
    scales = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float16)
    prepared = pq2_format.prepare(pq2_format.pack(codes, scales))
    assert prepared.data.shape == (2 * 256 // 4 + 2 * 2 * 2,)
    assert prepared.data[:128].nonzero().flatten().tolist() == [64 + 32]
    assert int(prepared.data[96]) == 0b01_10_01_00
    assert prepared.data[128:].tolist() == [0x00, 0x3C, 0x00, 0x40, 0x00, 0x38, 0x00, 0xBC]


@given(st.binary(min_size=1, max_size=64))
def test_code_bytes_come_back(content: bytes) -> None:
    packed = torch.tensor(list(content), dtype=torch.uint8)
    codes = pq2_format.unpack_codes(packed)
    by_hand = [byte >> 2 * place & 3 for byte in content for place in range(4)]
    assert codes.tolist() == by_hand
    if 3 not in by_hand:
        assert torch.equal(pq2_format.pack_codes(codes), packed)


@given(st.data(), st.integers(1, 3), st.sampled_from([1e-3, 1.0, 300.0]))
def test_no_ternary_group_is_nearer(data: st.DataObject, letters: int, size: float) -> None:
    """Against every choice of what to keep, for weights of few magnitudes; it need not be the largest that are kept."""
    magnitudes = [size * data.draw(st.floats(0.01, 1.0), label="magnitude") for _ in range(letters)]
    picks = data.draw(st.lists(st.integers(-letters, letters), min_size=128, max_size=128), label="picks")
    group = torch.tensor([[(pick > 0) - (pick < 0)] for pick in picks], dtype=torch.float64).flatten()
    weight = group * torch.tensor([magnitudes[abs(pick) - 1] if pick else 0.0 for pick in picks])
    weight = weight.float().double().unsqueeze(0)
    counts = [sum(abs(pick) == letter + 1 for pick in picks) for letter in range(letters)]
    squares = float(weight.square().sum())
    best = squares
    for kept in itertools.product(*(range(count + 1) for count in counts)):
        number = sum(kept)
        if number:
            total = sum(k * m for k, m in zip(kept, magnitudes, strict=True))
            best = min(best, squares - total * total / number)
    codes, scales = pq2_format.ternarize(weight)
    error = float((weight - values(codes, scales)).square().sum())
    # A scale is rounded to fp16: 2^-11 of it at most for each weight that is kept, or 2^-25 where it is subnormal.
    rounding = 128 * max(float(scales.max()) * 2.0**-11, 2.0**-25) ** 2
    assert error <= best + rounding + 1e-6 * squares


@given(st.integers(1, 4), st.integers(1, 3), seeds)
def test_what_is_ternary_already_comes_back_as_it_is(n: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 3, (n, groups * 128), dtype=torch.uint8, generator=generator)
    # Every positive finite fp16, subnormal ones too.
    bits = torch.randint(1, 0x7C00, (n, groups), generator=generator).to(torch.int16)
    scales = bits.view(torch.float16)
    again, d = pq2_format.ternarize(values(codes, scales))
    assert torch.equal(again, codes)
    assert torch.equal(d, scales)


@given(st.integers(1, 3), seeds, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_making_ternary_twice_changes_nothing(n: int, seed: int, dtype: torch.dtype) -> None:
    weight = torch.randn(n, 256, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes, scales = pq2_format.ternarize(weight)
    assert int(codes.max()) <= 2
    assert bool((scales > 0).all())
    again = pq2_format.ternarize(values(codes, scales))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def test_a_group_of_zeros_and_one_too_small_for_fp16_are_zero() -> None:
    weight = torch.zeros(2, 128)
    weight[1] = 1e-9
    codes, scales = pq2_format.ternarize(weight)
    assert bool((codes == 1).all())
    assert scales.tolist() == [[0.0], [0.0]]


def test_a_random_matrix_has_outputs_of_about_one() -> None:
    prepared = pq2_format.random(500, 1024, seed=1)
    blocks = pq2_format.to_blocks(prepared)
    pq2_format.check_blocks(blocks)
    x = torch.randn(1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spread = float((values(*pq2_format.unpack(blocks)) @ x).std())
    assert 0.85 < spread < 1.15
    assert torch.equal(pq2_format.random(500, 1024, seed=1).data, prepared.data)
    assert not torch.equal(pq2_format.random(500, 1024, seed=2).data, prepared.data)


@pytest.mark.parametrize("k", [0, 64, 130])
def test_a_row_that_is_no_whole_number_of_groups_is_refused(k: int) -> None:
    with pytest.raises(FormatError, match=f"K is {k}.*multiple of 128"):
        pq2_format.ternarize(torch.zeros(2, k))


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (torch.full((1, 128), float("nan")), "NaN or infinite"),
        (torch.tensor([[1.0] * 127 + [float("-inf")]]), "NaN or infinite"),
        (torch.full((1, 128), 65520.0), "exceeds fp16 (65504): the largest weight is 65520"),
        (torch.zeros(1, 128, dtype=torch.int8), "floating matrix [N, K], this is torch.int8 [1, 128]"),
        (torch.zeros(128), "floating matrix [N, K], this is torch.float32 [128]"),
    ],
)
def test_weights_that_cannot_be_ternary_are_refused(weight: torch.Tensor, says: str) -> None:
    with pytest.raises(FormatError, match=re.escape(says)):
        pq2_format.ternarize(weight)


def test_the_largest_scale_fits() -> None:
    codes, scales = pq2_format.ternarize(torch.full((1, 128), -65504.0))
    assert float(values(codes, scales)[0, 0]) == -65504.0


def good() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 256, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.float16)


@pytest.mark.parametrize(
    ("codes", "scales", "says"),
    [
        (torch.full((2, 256), 3, dtype=torch.uint8), good()[1], "code 3"),
        (good()[0].int(), good()[1], "codes are uint8, these are torch.int32"),
        (good()[0].flatten(), good()[1], "a matrix [N, K], these are [512]"),
        (good()[0], good()[1].float(), "are float16 [2, 2], these are torch.float32 [2, 2]"),
        (good()[0], good()[1].T[:1], "are float16 [2, 2], these are torch.float16 [1, 2]"),
        (good()[0], good()[1] * float("inf"), "row 0, group 0 is inf"),
    ],
)
def test_what_cannot_be_packed_is_refused(codes: torch.Tensor, scales: torch.Tensor, says: str) -> None:
    with pytest.raises(FormatError, match=re.escape(says)):
        pq2_format.pack(codes, scales)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7C01, 0xFFFF])
@given(row=st.integers(0, 2), group=st.integers(0, 1))
def test_a_scale_that_is_not_finite_is_found(bits: int, row: int, group: int) -> None:
    blocks = pq2_format.pack(torch.ones(3, 256, dtype=torch.uint8), torch.ones(3, 2, dtype=torch.float16))
    blocks[row, group * 34 : group * 34 + 2] = torch.tensor([bits & 0xFF, bits >> 8])
    with pytest.raises(
        FormatError, match=rf"layer: the scale of row {row}, group {group} is (-?inf|nan): it must be finite"
    ):
        pq2_format.check_blocks(blocks, "layer")


@given(row=st.integers(0, 2), place=st.integers(0, 255))
def test_code_3_is_found_wherever_it_is(row: int, place: int) -> None:
    blocks = pq2_format.pack(torch.ones(3, 256, dtype=torch.uint8), torch.ones(3, 2, dtype=torch.float16))
    byte = 34 * (place // 128) + 2 + place % 128 // 4
    blocks[row, byte] |= 0b11 << 2 * (place % 4)
    with pytest.raises(FormatError, match=rf"layer: row {row} has code 3"):
        pq2_format.check_blocks(blocks, "layer")


@pytest.mark.parametrize("blocks", [torch.zeros(2, 33, dtype=torch.uint8), torch.zeros(2, 0, dtype=torch.uint8)])
def test_rows_that_are_no_whole_blocks_are_refused(blocks: torch.Tensor) -> None:
    for read in (pq2_format.check_blocks, pq2_format.unpack, pq2_format.prepare):
        with pytest.raises(FormatError, match=re.escape("PQ2 blocks are uint8 [N, K / 128 * 34]")):
            read(blocks)


def test_a_prepared_allocation_of_another_size_is_refused() -> None:
    with pytest.raises(
        FormatError, match=re.escape("a prepared [2, 256] matrix is uint8 [136], this is torch.uint8 [135]")
    ):
        pq2_format.view(torch.zeros(135, dtype=torch.uint8), 2, 256)
