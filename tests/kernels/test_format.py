"""The PQ2 format: what is packed comes back, what is damaged is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pq2 import format as pq2_format
from pq2.errors import FormatError


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_what_is_packed_comes_back(n: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 3, (n, groups * 128), dtype=torch.uint8, generator=generator)
    scales = torch.randn(n, groups, generator=generator).to(torch.float16)
    blocks = pq2_format.pack(codes, scales)
    assert blocks.shape == (n, groups * 34)
    again, d = pq2_format.unpack(blocks)
    assert torch.equal(again, codes)
    assert torch.equal(d, scales)
    assert torch.equal(pq2_format.to_blocks(pq2_format.prepare(blocks)), blocks)


def test_a_block_has_the_documented_bytes() -> None:
    codes = torch.ones(1, 128, dtype=torch.uint8)
    codes[0, 5] = 2  # byte 1, bits 2 and 3
    blocks = pq2_format.pack(codes, torch.tensor([[1.0]], dtype=torch.float16))
    assert blocks[0, :2].tolist() == [0x00, 0x3C]  # fp16 one, little-endian
    assert blocks[0, 2:5].tolist() == [0b01010101, 0b01011001, 0b01010101]


@pytest.mark.parametrize("k", [0, 64, 130])
def test_a_row_that_is_no_whole_number_of_groups_is_refused(k: int) -> None:
    with pytest.raises(FormatError, match=f"K is {k}.*multiple of 128"):
        pq2_format.ternarize(torch.zeros(2, k))
