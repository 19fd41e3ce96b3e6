"""The ground truth itself, against sums that are written out."""

import torch
from properties import given, seeds, st

from pq2 import reference
from pq2.format import pack, prepare, random, to_blocks
from pq2.quantize import dequantize, quantize


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_product_by_hand() -> None:
    codes = torch.ones(2, 256, dtype=torch.uint8)
    codes[0, 0], codes[0, 129], codes[1, 255] = 2, 0, 2
    weight = prepare(pack(codes, torch.tensor([[0.5, 2.0], [1.0, -4.0]], dtype=torch.float16)))
    dense = reference.dequantize(weight)
    assert dense.nonzero().tolist() == [[0, 0], [0, 129], [1, 255]]
    assert [dense[0, 0], dense[0, 129], dense[1, 255]] == [0.5, -2.0, -4.0]
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1], x[0, 129], x[0, 255] = 3.0, 127.0, 254.0, 20.9  # scales 1 and 2: q is 3, 127, 127, 10
    assert reference.matmul(x, weight).tolist() == [[3 * 0.5 - 254 * 2.0, 20.0 * -4.0]]
    assert torch.equal(reference.exact_matmul(x, weight), x.double() @ dense.T)


@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 3), seeds)
def test_a_product_is_that_of_what_both_stand_for(m: int, n: int, groups: int, seed: int) -> None:
    x, weight = noise(m, groups * 128, seed=seed), random(n, groups * 128, seed=seed)
    expected = dequantize(quantize(x)) @ reference.dequantize(weight).T
    torch.testing.assert_close(reference.matmul(x, weight), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(reference.matmul_quantized(quantize(x), weight), reference.matmul(x, weight))


@given(st.integers(1, 4), st.integers(1, 3), seeds)
def test_quantising_activations_costs_half_a_step_a_weight_at_most(m: int, groups: int, seed: int) -> None:
    x, weight = noise(m, groups * 128, seed=seed), random(6, groups * 128, seed=seed)
    difference = (reference.matmul(x, weight) - reference.exact_matmul(x, weight)).abs()
    steps = quantize(x).scales.double().repeat_interleave(128, dim=1)
    bound = (0.5 + 2.0**-16) * steps @ reference.dequantize(weight).abs().T
    assert bool((difference <= bound).all())
    assert bool((difference > 0).any())


@given(st.integers(1, 3), seeds, st.sampled_from([2, 4]))
def test_parts_of_a_matrix_make_the_whole(m: int, seed: int, parts: int) -> None:
    """What tensor parallelism does: rows of blocks side by side, or whole blocks along K added up."""
    x, whole = noise(m, 512, seed=seed), random(8, 512, seed=seed)
    blocks = to_blocks(whole)
    product = reference.matmul(x, whole)
    rows = [reference.matmul(x, prepare(part)) for part in blocks.chunk(parts, dim=0)]
    assert torch.equal(torch.cat(rows, dim=1), product)
    columns = [
        reference.matmul(part_of_x, prepare(part))
        for part_of_x, part in zip(x.chunk(parts, dim=1), blocks.chunk(parts, dim=1), strict=True)
    ]
    torch.testing.assert_close(torch.stack(columns).sum(0), product, rtol=1e-12, atol=1e-12)


def test_a_small_projection_is_computed_in_float64() -> None:
    x, weight = noise(3, 40, seed=0).bfloat16(), noise(7, 40, seed=1).bfloat16()
    product = reference.small_gemm(x, weight)
    assert product.dtype == torch.float64
    by_hand = [[sum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()] for row in x.tolist()]
    torch.testing.assert_close(product, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-14, atol=1e-14)
