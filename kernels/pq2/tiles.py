"""What the Gluon paths `direct` and `ring` share: a tile of the product by mma m16n8k32, a group of 128 at a time.

Operand A is the weights. A lane of an A fragment holds 8 bytes of a row for each k-step of 32: those of its two words of
code bytes, masked to one plane. So code bytes go into fragments as they lie in memory, and
`convert_layout(assert_trivial=True)` has the compiler confirm that nothing moves. Operand B is the activations, stored in
the order of its fragments (`quantize.Fragments`).

Every accumulator begins at 12582912 - T, which takes the codes' offset of one back and makes the bits of the sum, read as
fp32, the number 12582912 + dot: one subtraction converts it, where a conversion has half the rate.

WARPS_K warps share a row of the weight, WARPS_N the rows of a tile: tensors are [WARPS_K, ...], and group
`step * WARPS_K + w` is warp w's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from pq2 import quantize
from pq2.compat import mbarrier_arrive

START = gl.constexpr(float(quantize.START))
START_BITS = gl.constexpr(quantize.START_BITS)

PLANES = gl.constexpr(
    "{ .reg .b32 t; and.b32 $0, $4, 0x03030303; shr.u32 t, $4, 2; and.b32 $1, t, 0x03030303; "
    "shr.u32 t, $4, 4; and.b32 $2, t, 0x03030303; shr.u32 t, $4, 6; and.b32 $3, t, 0x03030303; }"
)


@gluon.jit
def planes(codes):
    """The four planes of code bytes: uint8 -> four int8 tensors of 0, 1, 2. Four bytes an instruction, none is moved."""
    return gl.inline_asm_elementwise(
        PLANES, "=&r,=&r,=&r,=r,r", [codes], dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4
    )


DECODE = gl.constexpr(
    "{ .reg .b32 low, high; "
    "lop3.b32 low, $4, 0x33333333, 0x44444444, 0xEA; prmt.b32 $0, 0, 0x000100FF, low; "
    "shr.u32 low, low, 16; prmt.b32 $1, 0, 0x000100FF, low; "
    "shr.u32 high, $4, 2; lop3.b32 high, high, 0x33333333, 0x44444444, 0xEA; prmt.b32 $2, 0, 0x000100FF, high; "
    "shr.u32 high, high, 16; prmt.b32 $3, 0, 0x000100FF, high; }"
)
"""A word of 16 codes -> four words of weights, by the step they belong to. PRMT looks code c up at byte 4 + c, which is in
its second operand: a constant there needs no register."""


@gluon.jit
def decode(codes, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Code bytes [ROWS, 32] of a group -> operand A, int8 [ROWS, 128] in the order `steps`; no byte leaves its lane."""
    a, b, c, d = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,=&r,=&r,r", [codes], dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4
    )
    # Of a byte: half of the lanes' bytes, pair of its words, place in the pair; then what was joined, planes and words.
    parts = gl.reshape(gl.join(gl.join(a, b), gl.join(c, d)), (ROWS, 4, 2, 4, 2, 2))
    a = gl.reshape(gl.permute(parts, (0, 5, 4, 2, 1, 3)), (ROWS, 128))
    return gl.convert_layout(a, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def arrive_copied(barrier):
    """Each lane arrives at a barrier when what it has asked `copy_async` for is there; the barrier counts the lanes."""
    mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def place(tile, tiles_m, tiles_n, band):
    """The token tile and the row tile of a tile; `band` token tiles after each other meet the same rows in the L2 cache."""
    first = tile // (band * tiles_n) * band
    inside = tile % (band * tiles_n)
    width = gl.minimum(tiles_m - first, band)
    return first + inside % width, inside // width


@gluon.constexpr_function
def bases(size, step):
    """The basis vectors of an index of `size` (a power of two) that advances by `step`."""
    found = []
    place = 1
    while place < size:
        found.append([place * part for part in step])
        place *= 2
    return found


@gluon.constexpr_function
def power_of_two(size):
    """The next power of two."""
    return 1 << (size - 1).bit_length()


@gluon.constexpr_function
def mma_layout(WARPS_K, WARPS_N):
    """Accumulators [WARPS_K, rows of the weight, tokens]."""
    return gl.NVMMADistributedLayout([2, 0], [WARPS_K, WARPS_N, 1], [1, 16, 8])


@gluon.constexpr_function
def codes_layout(WARPS_K, WARPS_N, BLOCK_N):
    """Code bytes [BLOCK_N, WARPS_K * 32]: 8 of a row a lane, as an A fragment has them."""
    registers = bases(8, [0, 1]) + [[8, 0]] + bases(BLOCK_N // (16 * WARPS_N), [16 * WARPS_N, 0])
    lanes = bases(4, [0, 8]) + bases(8, [1, 0])
    warps = bases(WARPS_N, [16, 0]) + bases(WARPS_K, [0, 32])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, WARPS_K * 32])


@gluon.constexpr_function
def scales_layout(WARPS_K, WARPS_N, BLOCK_N):
    """Scales [BLOCK_N, WARPS_K], as the rows of accumulators lie."""
    registers = [[8, 0], *bases(BLOCK_N // (16 * WARPS_N), [16 * WARPS_N, 0])]
    lanes = [[0, 0], [0, 0], *bases(8, [1, 0])]
    warps = bases(WARPS_N, [16, 0]) + bases(WARPS_K, [0, 1])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, WARPS_K])


@gluon.constexpr_function
def q_layout(WARPS_K, WARPS_N, TOKENS):
    """Activations [WARPS_K, 2, TOKENS, 64]: 32 bytes of a token a lane, as B fragments have them."""
    registers = [*bases(16, [0, 0, 0, 1]), [0, 1, 0, 0], *bases(TOKENS // 8, [0, 0, 8, 0])]
    lanes = bases(4, [0, 0, 0, 16]) + bases(8, [0, 0, 1, 0])
    warps = bases(WARPS_N, [0, 0, 0, 0]) + bases(WARPS_K, [1, 0, 0, 0])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WARPS_K, 2, TOKENS, 64])


@gluon.constexpr_function
def meta_layout(WARPS_K, WARPS_N, TOKENS):
    """Scales and starts [WARPS_K, TOKENS, 2], as the columns of accumulators lie."""
    registers = [[0, 0, 1], [0, 1, 0], *bases(TOKENS // 8, [0, 8, 0])]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    warps = bases(WARPS_N, [0, 0, 0]) + bases(WARPS_K, [1, 0, 0])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WARPS_K, TOKENS, 2])


@gluon.constexpr_function
def sum_layout(WARPS_K, WARPS_N, BLOCK_N):
    """Partial sums [WARPS_K, BLOCK_N, TOKENS]: a thread has all WARPS_K of an output, neighbours have neighbouring rows."""
    warps = WARPS_K * WARPS_N
    down = min(warps, BLOCK_N // 16)
    return gl.BlockedLayout([WARPS_K, 1, 1], [1, 16, 2], [1, down, warps // down], [0, 1, 2])


@gluon.jit
def q_pointers(q_ptr, WARPS_K: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the activations of the first step are, and their tokens: [WARPS_K, 2, TOKENS, 64] and [1, 1, TOKENS, 1]."""
    group = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[:, None, None, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[None, :, None, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :, None]
    byte = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[None, None, None, :]
    return q_ptr + ((group * 2 + pair) * TOKENS + token) * 64 + byte, group, token


@gluon.jit
def meta_pointers(meta_ptr, WARPS_K: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the scales and starts of the first step are [WARPS_K, TOKENS, 2], and their groups [WARPS_K, 1, 1]."""
    group = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    part = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return meta_ptr + (group * TOKENS + token) * 2 + part, group


@gluon.jit
def b_fragments(q, WARPS_K: gl.constexpr, TOKENS: gl.constexpr, MMA: gl.constexpr):
    """Activations [WARPS_K, 2, TOKENS, 64] -> operand B of the four planes, int8 [WARPS_K, 32, TOKENS] each."""
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    # Bytes of a token: lane, plane within its pair, half of the k-step, place within the half.
    b = gl.permute(gl.reshape(q, (WARPS_K, 2, TOKENS, 4, 2, 2, 4)), (0, 5, 3, 6, 2, 1, 4))
    even, odd = gl.split(gl.reshape(b, (WARPS_K, 32, TOKENS, 2, 2)))
    b0, b2 = gl.split(even)
    b1, b3 = gl.split(odd)
    return (
        gl.convert_layout(b0, B, assert_trivial=True), gl.convert_layout(b1, B, assert_trivial=True),
        gl.convert_layout(b2, B, assert_trivial=True), gl.convert_layout(b3, B, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def columns(meta, MMA: gl.constexpr):
    """Scales and starts [WARPS_K, TOKENS, 2] -> fp32 scales and int32 starts [WARPS_K, TOKENS] of accumulators' columns."""
    scale, start = gl.split(meta)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, MMA)
    scale = gl.convert_layout(scale.to(gl.float32, bitcast=True), COLUMNS, assert_trivial=True)
    return scale, gl.convert_layout(start, COLUMNS, assert_trivial=True)


@gluon.jit
def a_fragment(plane, WARPS_K: gl.constexpr, BLOCK_N: gl.constexpr, MMA: gl.constexpr):
    """A plane [BLOCK_N, WARPS_K * 32] -> operand A, int8 [WARPS_K, BLOCK_N, 32]."""
    parts = gl.permute(gl.reshape(plane, (BLOCK_N, WARPS_K, 4, 2, 4)), (1, 0, 3, 2, 4))
    a = gl.reshape(parts, (WARPS_K, BLOCK_N, 32))
    return gl.convert_layout(a, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def multiply_add(
    total, codes, d, b, column, WARPS_K: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, MMA: gl.constexpr
):
    """One group a warp along K, added to total.

    Args:
        total: fp32 [WARPS_K, BLOCK_N, TOKENS].
        codes: uint8 [BLOCK_N, WARPS_K * 32].
        d: fp16 [BLOCK_N, WARPS_K].
        b: What `b_fragments` gave.
        column: What `columns` gave.
    """
    p0, p1, p2, p3 = planes(codes)
    dot = gl.full((WARPS_K, BLOCK_N, TOKENS), 0, gl.int32, MMA) + gl.expand_dims(column[1], 1)
    dot = mma_v2(a_fragment(p0, WARPS_K, BLOCK_N, MMA), b[0], dot)
    dot = mma_v2(a_fragment(p1, WARPS_K, BLOCK_N, MMA), b[1], dot)
    dot = mma_v2(a_fragment(p2, WARPS_K, BLOCK_N, MMA), b[2], dot)
    dot = mma_v2(a_fragment(p3, WARPS_K, BLOCK_N, MMA), b[3], dot)
    exact = dot.to(gl.float32, bitcast=True) - START
    row = gl.convert_layout(gl.permute(d, (1, 0)), gl.SliceLayout(2, MMA), assert_trivial=True)
    return total + exact * (gl.expand_dims(column[0], 1) * gl.expand_dims(row.to(gl.float32), 2))


@gluon.jit
def store_rows(out_ptr, total, first_row, M, N, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Store outputs [BLOCK_N, TOKENS] of rows from first_row on, transposed: out [M, N]."""
    row = first_row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    at = token.to(gl.int64)[None, :] * N + row[:, None]
    gl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(row < N)[:, None] & (token < M)[None, :])
