"""Instructions that Triton has no function for, each with a definition that its interpreter can run."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set when this was imported: then inline assembly is not to be had."""

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a small fp32 half to even."""

if INTERPRETED.value:

    @triton.jit
    def _byte(word, place: tl.constexpr):
        return (word << (24 - 8 * place)) >> 24

    @triton.jit
    def dp4a(a, b, c):
        """Four signed bytes of a times four of b, added to c; int32."""
        for place in tl.static_range(4):
            c += _byte(a, place) * _byte(b, place)
        return c

    @triton.jit
    def prmt(a, selectors):
        """The bytes of a that the four low nibbles of `selectors` (0 to 3 each) name, as one word."""
        word = a * 0
        for place in tl.static_range(4):
            choice = (selectors >> (4 * place)) & 3
            word |= ((a >> (8 * choice)) & 0xFF) << (8 * place)
        return word

    @triton.jit
    def interleave(a, b, odd: tl.constexpr):
        """Bytes 0 and 2 (or 1 and 3) of a, then of b, as one word."""
        shift: tl.constexpr = 8 if odd else 0
        low = ((a >> shift) & 0xFF) | (((a >> (16 + shift)) & 0xFF) << 8)
        high = ((b >> shift) & 0xFF) | (((b >> (16 + shift)) & 0xFF) << 8)
        return low | (high << 16)

else:

    @triton.jit
    def dp4a(a, b, c):
        """Four signed bytes of a times four of b, added to c; int32."""
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def prmt(a, selectors):
        """The bytes of a that the four low nibbles of `selectors` (0 to 3 each) name, as one word."""
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [a, selectors], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def interleave(a, b, odd: tl.constexpr):
        """Bytes 0 and 2 (or 1 and 3) of a, then of b, as one word."""
        if odd:
            word = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            word = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
            )
        return word


@triton.jit
def round_half_even(x):
    """A fp32 of at most 2^22 rounded to an integer, ties to even, as fp32."""
    return (x + ROUND) - ROUND
