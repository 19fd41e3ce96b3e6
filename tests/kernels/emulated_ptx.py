"""Inline assembly without a GPU: the PTX that kernels have, run on NumPy arrays of words, for `emulated`."""

import functools
import operator
import re

import numpy as np


def run(asm, tensor, results):
    """Inline assembly on words of four bytes of the last axis: the results as bytes. It knows what `tiles` uses."""
    words = {f"${results}": np.ascontiguousarray(tensor).view(np.uint32)}

    def value(operand):
        return words[operand] if operand in words else np.uint32(int(operand, 0))

    def prmt(low, high, selector):
        source = np.uint64(low) | np.uint64(high) << np.uint64(32)
        chosen = np.zeros_like(selector)
        for byte in range(4):
            index = (selector >> np.uint32(4 * byte)) & np.uint32(15)
            assert not (index & 8).any()  # the sign's variant
            chosen |= ((source >> (index.astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(
                np.uint32
            ) << np.uint32(8 * byte)
        return chosen

    def lop3(a, b, c, table):
        found = np.zeros_like(a)
        for number in range(8):
            if table >> np.uint32(number) & np.uint32(1):
                inputs = zip((a, b, c), (number & 4, number & 2, number & 1), strict=True)
                found |= functools.reduce(operator.and_, [x if wanted else ~x for x, wanted in inputs])
        return found

    operations = {
        "and.b32": lambda a, b: a & b, "shr.u32": lambda a, b: a >> b, "prmt.b32": prmt, "lop3.b32": lop3,
    }  # fmt: skip
    for line in filter(None, (part.strip() for part in re.sub(r"[{}]", "", asm).split(";"))):
        if not line.startswith(".reg"):
            name, _, operands = line.partition(" ")
            target, *sources = (operand.strip() for operand in operands.split(","))
            words[target] = operations[name](*map(value, sources))
    return [words[f"${number}"].view(np.int8) for number in range(results)]
