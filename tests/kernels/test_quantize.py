"""Activations in int8, their orders for the kernels, and the rotation."""

import re

import pytest
import torch
from properties import given, seeds, st

from pq2 import format as pq2_format
from pq2.errors import FormatError
from pq2.quantize import Order, check_rotation, dequantize, fragments, hadamard, places, quantize, rotate, unrotate

orders = st.sampled_from(["natural", "planes", "fragments", "steps"])
blocks = st.sampled_from([1, 2, 8, 128, 256])


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix by its definition: H(2n) = [[H, H], [H, -H]]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix


@given(st.integers(0, 4), st.integers(1, 3), seeds, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_every_value_is_within_half_a_step(m: int, groups: int, seed: int, dtype: torch.dtype) -> None:
    x = noise(m, groups * 128, seed=seed, dtype=dtype)
    quantized = quantize(x)
    assert quantized.q.shape == x.shape
    assert quantized.scales.shape == quantized.sums.shape == (m, groups)
    grouped = x.double().reshape(m, groups, 128)
    assert torch.equal(quantized.scales, (grouped.abs().amax(-1).float() / 127))
    q = quantized.q.reshape(m, groups, 128)
    assert bool((q.abs().amax(-1) == 127).all())
    assert torch.equal(quantized.sums, q.sum(-1, dtype=torch.int32))
    step = quantized.scales.double().unsqueeze(-1)
    error = (dequantize(quantized).reshape(m, groups, 128) - grouped).abs()
    assert bool((error <= step * (0.5 + 2.0**-16)).all())


def test_ties_round_to_even() -> None:
    x = torch.zeros(1, 128)
    x[0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    quantized = quantize(x)
    assert quantized.scales.tolist() == [[1.0]]
    assert quantized.q[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert quantized.sums.tolist() == [[127 + 2 + 2 - 2 - 2 + 126]]


def test_groups_of_zeros_and_groups_that_are_not_finite() -> None:
    x = torch.zeros(1, 512)
    x[0, 200], x[0, 300], x[0, 400] = float("nan"), float("inf"), 1.0
    quantized = quantize(x)
    assert quantized.scales[0, 0] == 0
    assert bool((quantized.q[0, :128] == 0).all())
    back = dequantize(quantized).reshape(4, 128)
    # What is not a number must not come out as one.
    assert torch.isfinite(back).all(-1).tolist() == [True, False, False, True]
    assert not torch.isfinite(back[1:3]).any()


@given(orders)
def test_an_order_is_a_permutation(order: Order) -> None:
    assert sorted(places(order).tolist()) == list(range(128))


@given(orders, seeds, st.integers(1, 3), st.integers(1, 2))
def test_an_order_moves_bytes_and_nothing_else(order: Order, seed: int, m: int, groups: int) -> None:
    x = noise(m, groups * 128, seed=seed)
    natural, ordered = quantize(x), quantize(x, order)
    assert torch.equal(ordered.scales, natural.scales)
    assert torch.equal(ordered.sums, natural.sums)
    for group in range(groups):
        for j, place in enumerate(places(order).tolist()):
            assert torch.equal(ordered.q[:, group * 128 + place], natural.q[:, group * 128 + j])
    assert torch.equal(dequantize(ordered, order), dequantize(natural))


@pytest.mark.parametrize(
    ("weight", "plane", "fragment"),
    [
        (0, 0, 0),
        (1, 32, 8),
        (2, 64, 64),
        (3, 96, 72),
        (4, 1, 1),  # byte 1
        (15, 99, 75),  # byte 3, plane 3
        (16, 4, 4),  # byte 4
        (17, 36, 12),
        (31, 103, 79),  # byte 7
        (32, 8, 16),  # byte 8: the first byte of the second lane
        (48, 12, 20),  # byte 12
        (127, 127, 127),
    ],
)
def test_where_some_weights_go(weight: int, plane: int, fragment: int) -> None:
    assert int(places("planes")[weight]) == plane
    assert int(places("fragments")[weight]) == fragment


def test_what_a_lane_of_the_mma_holds_of_a_pair_of_planes_lies_together() -> None:
    """m16n8k32: lane t of a quad has bytes 4 t to 4 t + 3 of a k-step in a register, 16 + 4 t to 16 + 4 t + 3 in another.

    They meet code bytes 8 t to 8 t + 7 of a row, which it has loaded as two words.
    """
    where = places("fragments").tolist()
    for pair in range(2):
        for lane in range(4):
            first = pair * 64 + lane * 16
            held = {where.index(place) for place in range(first, first + 16)}
            assert held == {4 * (8 * lane + byte) + 2 * pair + plane for byte in range(8) for plane in range(2)}


@given(seeds)
def test_nibbles_of_a_lanes_words_are_the_fragments_of_the_steps(seed: int) -> None:
    """wgmma m64k32: register h of lane t of a quad has columns 16h + 4t to 16h + 4t + 3 of a step, one to a byte."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 3, (128,), dtype=torch.uint8, generator=generator)
    ordered = torch.empty(128, dtype=torch.uint8)
    ordered[places("steps")] = codes
    packed = bytes(pq2_format.pack_codes(codes).tolist())
    for lane in range(4):
        for half in range(2):
            word = int.from_bytes(packed[8 * lane + 4 * half :][:4], "little")
            for step in range(4):
                nibbles = ((word >> 2 * (step // 2)) & 0x33333333) >> 16 * (step % 2)
                first = step * 32 + half * 16 + lane * 4
                assert [nibbles >> 4 * i & 3 for i in range(4)] == ordered[first : first + 4].tolist()


def test_rows_are_tiled_as_the_kernels_read_them() -> None:
    x = noise(3, 256, seed=3)
    ordered = quantize(x, "fragments")
    tiled = fragments(ordered, 8)
    assert tiled.q.shape == (2, 2, 8, 64)
    assert tiled.meta.shape == (2, 8, 2)
    for group in range(2):
        for token in range(3):
            both = ordered.q[token, group * 128 : group * 128 + 128]
            assert torch.equal(torch.cat([tiled.q[group, 0, token], tiled.q[group, 1, token]]), both)
            scale, start = tiled.meta[group, token]
            assert scale.view(torch.float32) == ordered.scales[token, group]
            assert start == 0x4B400000 - ordered.sums[token, group]
    assert not tiled.q[:, :, 3:].any()


@given(seeds)
def test_masked_words_of_codes_meet_the_planes(seed: int) -> None:
    """The kernel of one row: word w of plane s against (code word w >> 2 s) & 0x03030303, four products a word."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 3, (128,), dtype=torch.uint8, generator=generator)
    quantized = quantize(noise(1, 128, seed=seed), "planes")
    packed, q = pq2_format.pack_codes(codes).tolist(), quantized.q[0].tolist()
    total = 0
    for plane in range(4):
        for word in range(8):
            value = int.from_bytes(bytes(packed[4 * word : 4 * word + 4]), "little")
            masked = ((value >> 2 * plane) & 0x03030303).to_bytes(4, "little")
            total += sum(masked[i] * q[32 * plane + 4 * word + i] for i in range(4))
    natural = quantize(noise(1, 128, seed=seed)).q[0].long()
    assert total == int((natural * codes.long()).sum())
    assert total - int(quantized.sums) == int((natural * (codes.long() - 1)).sum())


@pytest.mark.parametrize("x", [torch.zeros(128), torch.zeros(1, 1, 128), torch.zeros(1, 128, dtype=torch.int32)])
def test_activations_of_another_form_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(FormatError, match=re.escape(f"floating matrix [M, K], these are {x.dtype} {list(x.shape)}")):
        quantize(x)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(FormatError, match="'plane': orders of a group's bytes are natural, planes, fragments, steps"):
        quantize(torch.ones(1, 128), "plane")  # type: ignore[arg-type]


@given(blocks)
def test_the_transform_is_sylvesters_matrix_and_orthonormal(block: int) -> None:
    matrix = hadamard(torch.eye(block, dtype=torch.float64), block)
    torch.testing.assert_close(matrix, sylvester(block) * block**-0.5, rtol=0, atol=1e-15)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(block, dtype=torch.float64), rtol=0, atol=1e-12)


@given(blocks, st.integers(1, 3), st.integers(0, 3), seeds)
def test_blocks_are_transformed_one_by_one(block: int, count: int, m: int, seed: int) -> None:
    x = noise(m, count * block, seed=seed, dtype=torch.float64)
    by_hand = (x.reshape(m, count, block) @ sylvester(block) * block**-0.5).reshape(m, count * block)
    torch.testing.assert_close(hadamard(x, block), by_hand, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(hadamard(x, block), block), x, rtol=1e-12, atol=1e-12)


@given(blocks, seeds)
def test_a_rotated_weight_times_a_rotated_input_is_the_product(block: int, seed: int) -> None:
    x, weight = noise(3, 512, seed=seed, dtype=torch.float64), noise(5, 512, seed=seed + 1, dtype=torch.float64)
    signs = torch.where(noise(512, seed=seed + 2) > 0, 1, -1).to(torch.int8)
    product = rotate(x, signs, block) @ rotate(weight, signs, block).T
    torch.testing.assert_close(product, x @ weight.T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(unrotate(rotate(x, signs, block), signs, block), x, rtol=1e-12, atol=1e-12)


def test_signs_come_before_the_transform() -> None:
    x = torch.tensor([[1.0, 2.0]])
    signs = torch.tensor([1, -1], dtype=torch.int8)
    torch.testing.assert_close(rotate(x, signs, 2), torch.tensor([[-1.0, 3.0]]) * 0.5**0.5)
    torch.testing.assert_close(unrotate(x, signs, 2), torch.tensor([[3.0, 1.0]]) * 0.5**0.5)


def test_a_rotation_is_computed_in_fp32_and_rounded_once() -> None:
    x = noise(4, 1024, seed=0, dtype=torch.bfloat16)
    signs = torch.ones(1024, dtype=torch.int8)
    rotated = rotate(x, signs, 1024)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, hadamard(x.float(), 1024).bfloat16())


@pytest.mark.parametrize("signs", [torch.ones(1), torch.ones(64), torch.ones(2, 128), torch.ones(())])
def test_signs_of_another_number_are_refused(signs: torch.Tensor) -> None:
    for turn in (rotate, unrotate):
        with pytest.raises(
            FormatError, match=re.escape(f"signs of an input of 128 are [128], these are {list(signs.shape)}")
        ):
            turn(torch.ones(2, 128), signs, 128)


@pytest.mark.parametrize(
    ("k", "block", "parts", "says"),
    [
        (5120, 96, 1, "q: a rotation over blocks of 96: the size must be a power of two"),
        (5120, 0, 1, "blocks of 0"),
        (5120, 2048, 1, "q: K is 5120, which rotation blocks of 2048 do not divide"),
        (5120, 1024, 2, "2 tensor-parallel ranks would cut the rotation: K is 5120 in 5 blocks of 1024; .*: 1, 5$"),
        (17408, 1024, 4, "ranks that cut between blocks: 1, 17$"),
        (4096, 1024, 3, "ranks that cut between blocks: 1, 2, 4$"),
    ],
)
def test_rotations_that_do_not_fit(k: int, block: int, parts: int, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        check_rotation(k, block, parts, "q")


@pytest.mark.parametrize(("k", "block", "parts"), [(5120, 1024, 1), (5120, 1024, 5), (4096, 1024, 4), (256, 1, 256)])
def test_rotations_that_fit(k: int, block: int, parts: int) -> None:
    check_rotation(k, block, parts)
