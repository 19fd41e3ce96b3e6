"""Gluon without a GPU: runs the source of a Gluon kernel, program by program, on NumPy arrays.

Gluon has no interpreter. Here the functions that its kernels call (`gl.load`, `mma_v2`, ...) are replaced by ones on
arrays, and the kernel's own Python is executed. Layouts say where an element is, not what it is, so they are ignored; that
operands get where they belong is what the compiler's `assert_trivial` and the tests on a GPU are for.

What it is strict about is asynchrony: bytes of `copy_async` are in shared memory only once a `wait_group` has waited for
the group that they were committed in; whoever read before finds what was there, and shared memory begins as 0xA5. A stage
that is written over before it was read, or read before it arrived, gives wrong numbers. Every access to global memory is
checked.
"""

import types
from collections import deque
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from triton.runtime.jit import JITFunction

DTYPES = {
    "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "float16": np.float16,
    "float32": np.float32, "bfloat16": "bfloat16",
}  # fmt: skip


class Value(np.ndarray):
    """A tensor of Gluon's: an array that knows `to`."""

    def to(self, dtype, bitcast=False):
        if bitcast:
            return self.view(dtype)
        if dtype == "bfloat16":
            return _value(torch.from_numpy(np.asarray(self)).bfloat16().float().numpy())
        return self.astype(dtype)


def _value(array):
    return np.asarray(array).view(Value)


class Pointer:
    """Places in a buffer."""

    def __init__(self, buffer, at=0):
        self.buffer = buffer
        self.at = np.asarray(at, np.int64)

    def __add__(self, offset):
        return Pointer(self.buffer, self.at + np.asarray(offset).astype(np.int64))

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.buffer.dtype_name)


class Buffer:
    """Global memory: the elements of a torch tensor."""

    def __init__(self, tensor):
        assert tensor.is_contiguous()
        self.tensor = tensor
        self.dtype_name = "bfloat16" if tensor.dtype == torch.bfloat16 else DTYPES[str(tensor.dtype)[6:]]
        flat = tensor.view(-1)
        self.array = None if tensor.dtype == torch.bfloat16 else flat.numpy()
        self.size = flat.numel()

    def _check(self, at):
        assert at.size == 0 or (at.min() >= 0 and at.max() < self.size), (
            f"access beyond {self.size}: {at.min()}, {at.max()}"
        )

    def read(self, at, mask, other):
        self._check(at[mask])
        found = np.full(at.shape, other, self.array.dtype)
        found[mask] = self.array[at[mask]]
        return found

    def write(self, at, value, mask):
        self._check(at[mask])
        if self.array is None:
            self.tensor.view(-1)[torch.from_numpy(at[mask])] = torch.from_numpy(
                np.asarray(value[mask], np.float32)
            ).bfloat16()
        else:
            self.array[at[mask]] = value[mask]


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, array):
        self.array = array

    def index(self, at):
        return Shared(self.array[int(at)])

    def slice(self, start, length, dim):
        where = [slice(None)] * self.array.ndim
        where[dim] = slice(int(start), int(start) + int(length))
        part = self.array[tuple(where)]
        assert part.shape[dim] == length
        return Shared(part)

    def load(self, layout):
        return _value(self.array.copy())

    def store(self, value):
        assert value.shape == self.array.shape
        self.array[...] = value


class Program:
    """One program: where it is in the grid, and its copies on the way."""

    def __init__(self, where, grid):
        self.where, self.grid = where, grid
        self.open, self.committed = [], deque()
        self.waited = False

    def copy_async(self, shared, pointer, mask=None):
        at, mask = _masked(pointer, mask)
        assert shared.array.shape == at.shape, (shared.array.shape, at.shape)
        self.open.append((shared, pointer.buffer.read(at, mask, 0)))

    def commit_group(self):
        self.committed.append(self.open)
        self.open = []

    def wait_group(self, outstanding):
        while len(self.committed) > outstanding:
            for shared, found in self.committed.popleft():
                shared.array[...] = found


def _masked(pointer, mask):
    at = pointer.at
    mask = np.ones((1,) * at.ndim, bool) if mask is None else np.asarray(mask)
    shape = np.broadcast_shapes(at.shape, mask.shape)
    return np.broadcast_to(at, shape), np.broadcast_to(mask, shape)


def _layout(*arguments):
    return None


def _gl(program):
    def load(pointer, mask=None, other=0, **hints):
        at, mask = _masked(pointer, mask)
        return _value(pointer.buffer.read(at, mask, other))

    def store(pointer, value, mask=None):
        at, mask = _masked(pointer, mask)
        pointer.buffer.write(at, np.broadcast_to(value, at.shape), mask)

    def allocate_shared_memory(dtype, shape, layout):
        return Shared(
            np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)
        )

    def split(x):
        assert x.shape[-1] == 2
        return x[..., 0], x[..., 1]

    return types.SimpleNamespace(
        arange=lambda start, end, layout: _value(np.arange(start, end, dtype=np.int32)),
        full=lambda shape, value, dtype, layout: _value(np.full(shape, value, dtype)),
        where=lambda condition, a, b: _value(np.where(condition, a, b)),
        minimum=lambda a, b: _value(np.minimum(a, b)),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.transpose(order),
        expand_dims=lambda x, axis: np.expand_dims(x, axis),
        sum=lambda x, axis: x.sum(axis=axis, dtype=x.dtype),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        static_range=range,
        program_id=lambda axis: _value(np.int32(program.where[axis])),
        num_programs=lambda axis: program.grid[axis],
        split=split, load=load, store=store, allocate_shared_memory=allocate_shared_memory, constexpr=object,
        **dict.fromkeys(
            ("SliceLayout", "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "SwizzledSharedLayout",
             "NVMMADistributedLayout"), _layout
        ),
        **DTYPES,
    )  # fmt: skip


def _planes(codes):
    return tuple(_value(((np.asarray(codes) >> (2 * s)) & 3).astype(np.int8)) for s in range(4))


def _mma(a, b, c):
    return _value(np.matmul(np.asarray(a, np.int32), np.asarray(b, np.int32)) + np.asarray(c))


def _dp4a(a, b, c):
    def wide(x):
        return np.ascontiguousarray(x).view(np.int8).reshape(*x.shape, 4).astype(np.int32)

    return _value((wide(a) * wide(b)).sum(axis=-1, dtype=np.int32) + np.asarray(c))


def _python(function, program, done):
    """A Gluon function as Python that calls the functions of this module, and so those that it calls."""
    if function in done:
        return done[function]
    replaced = {
        "gl": _gl(program), "mma_v2": _mma, "copy_async": program.copy_async, "commit_group": program.commit_group,
        "wait_group": program.wait_group, "gdc_launch_dependents": lambda: None, "gdc_wait": lambda: None,
    }  # fmt: skip
    found = {}
    copy = types.FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    done[function] = copy
    for name, value in function.__globals__.items():
        if name in replaced:
            found[name] = replaced[name]
        elif name == "planes":
            found[name] = _planes
        elif name == "dp4a":
            found[name] = _dp4a
        elif isinstance(value, JITFunction):
            found[name] = _python(value.fn, program, done)
        elif type(value).__name__ == "constexpr":
            found[name] = value.value
        else:
            found[name] = value
    return copy


class Emulated:
    """Stands in for a Gluon kernel: `kernel[grid](...)` runs all its programs."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        grid = (*grid, *(1,) * (3 - len(grid)))

        def launch(*arguments, num_warps=None, enable_fp_fusion=None, launch_pdl=None, **constants):
            arguments = [Pointer(Buffer(a)) if isinstance(a, torch.Tensor) else a for a in arguments]
            with np.errstate(invalid="ignore", over="ignore"):
                for where in np.ndindex(grid):
                    program = Program(where, grid)
                    _python(self.kernel.fn, program, {})(*arguments, **constants)

        return launch


@contextmanager
def emulated(module, *kernels):
    """Kernels of a module replaced by what runs them here."""
    with mock.patch.multiple(module, **{name: Emulated(getattr(module, name)) for name in kernels}):
        yield
