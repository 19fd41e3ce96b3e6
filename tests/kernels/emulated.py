"""Gluon without a GPU: runs the source of a Gluon kernel, program by program, on NumPy arrays.

Gluon has no interpreter. Here the functions that its kernels call (`gl.load`, `mma_v2`, ...) are replaced by ones on
arrays, and the kernel's own Python is executed. Layouts say where an element is, not what it is, so they are ignored; that
operands get where they belong is what the compiler's `assert_trivial` and the tests on a GPU are for.

What it is strict about is asynchrony: bytes of `copy_async` are in shared memory only once a `wait_group` has waited for
the group that they were committed in; whoever read before finds what was there, and shared memory begins as 0xA5. A stage
that is written over before it was read, or read before it arrived, gives wrong numbers. Every access to global memory is
checked.

The parts of a specialised program are threads, of which one runs at a time; at each wait and arrival another may go on,
drawn by chance. What they ask for lands either at once or when somebody waits for it; wgmma reads shared memory either when
it is asked for or when it is waited for, and a load either then or when its value is used (`Timing`): one finds what is
written over too early, the other what is read too early. A barrier that nobody can pass any more is an error that says so.
"""

import random
import threading
import types
from collections import deque
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import emulated_ptx
import numpy as np
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
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


class Late:
    """What a load of shared memory gives: read when it is used, since until then it may be queued."""

    def __init__(self, shared):
        self.shared, self.read = shared, None

    def value(self):
        if self.read is None:
            self.read = _value(self.shared.array.copy())
        return self.read

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value(), dtype)

    def __getitem__(self, where):
        return self.value()[where]

    def __getattr__(self, name):
        return getattr(self.value(), name)

    def __mul__(self, other):
        return self.value() * other


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

    def __init__(self, array, late, begin=None):
        self.array, self.late = array, late
        self.shape = array.shape
        self.begin = array.ctypes.data if begin is None else begin

    @property
    def offset(self):
        """Bytes from the beginning of what was allocated."""
        return self.array.ctypes.data - self.begin

    def _part(self, array):
        return Shared(array, self.late, self.begin)

    def permute(self, order):
        return self._part(self.array.transpose(order))

    def reshape(self, shape):
        return self._part(self.array.reshape(shape))

    def index(self, at):
        return self._part(self.array[int(at)])

    def slice(self, start, length, dim=0):
        where = [slice(None)] * self.array.ndim
        where[dim] = slice(int(start), int(start) + int(length))
        part = self.array[tuple(where)]
        assert part.shape[dim] == length
        return self._part(part)

    def load(self, layout):
        return Late(self) if self.late else _value(self.array.copy())

    def store(self, value):
        assert value.shape == self.array.shape
        self.array[...] = value


class Descriptor:
    """What bulk copies know of a tensor: they fill with zeros what is beyond it."""

    def __init__(self, descriptor):
        base, self.block_shape = descriptor.base, descriptor.block_shape
        assert base.data_ptr() % 16 == 0
        assert all(stride * base.element_size() % 16 == 0 for stride in descriptor.strides[:-1])
        assert self.block_shape[-1] * base.element_size() % 16 == 0
        assert list(base.shape) == list(descriptor.shape)
        self.array, self.layout = base.numpy(), None

    def read(self, at):
        found = np.zeros(self.block_shape, self.array.dtype)
        here = tuple(slice(int(first), int(first) + size) for first, size in zip(at, self.block_shape, strict=True))
        part = self.array[here]
        found[tuple(slice(size) for size in part.shape)] = part
        return found


class Timing(NamedTuple):
    """When asynchronous work happens: as late as it may, or at once; and what draws who runs next."""

    late: bool = True
    seed: int = 0


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, count):
        self.count = self.left = count
        self.expected = self.phase = 0
        self.coming = []  # late copies: where to, what, and the arrivals or bytes that they bring

    def passed(self, parity):
        if self.left == 0 or self.phase == parity:
            self.land()
        return self.phase != parity

    def land(self):
        for shared, found, arrivals, nbytes in self.coming:
            if shared is not None:
                shared.array[...] = found
            self.left -= arrivals
            self.expected -= nbytes
        self.coming = []
        self.turn()

    def turn(self):
        assert self.left >= 0, "more arrivals than the barrier counts"
        if self.left == 0 and self.expected == 0:
            self.phase ^= 1
            self.left = self.count


class Program:
    """One program: where it is in the grid, its copies on the way, and its parts."""

    def __init__(self, where, grid, timing):
        self.where, self.grid, self.timing = where, grid, timing
        self.committed = deque()
        self.own = threading.local()
        self.barriers = {}
        self.chance = random.Random(timing.seed)
        self.parts, self.running, self.failed = {}, None, None
        self.turn = threading.Condition()

    # Copies that a thread waits for itself.

    @property
    def open(self):
        if not hasattr(self.own, "open"):
            self.own.open = []
        return self.own.open

    def copy_async(self, shared, pointer, mask=None):
        at, mask = _masked(pointer, mask)
        assert shared.array.shape == at.shape, (shared.array.shape, at.shape)
        self.open.append((shared, pointer.buffer.read(at, mask, 0)))

    def commit_group(self):
        self.committed.append(list(self.open))
        self.open.clear()

    def wait_group(self, outstanding):
        while len(self.committed) > outstanding:
            for shared, found in self.committed.popleft():
                shared.array[...] = found

    # Barriers, and what arrives at them.

    def _barrier(self, shared):
        return self.barriers[shared.array.ctypes.data]

    def init(self, shared, count):
        self.barriers[shared.array.ctypes.data] = Barrier(count)

    def _bring(self, barrier, shared, found, arrivals, nbytes):
        barrier.coming.append((shared, found, arrivals, nbytes))
        if not self.timing.late:
            barrier.land()

    def expect(self, shared, nbytes):
        barrier = self._barrier(shared)
        barrier.expected += nbytes
        barrier.left -= 1
        barrier.turn()

    def release(self, shared):
        """The threads of a warpgroup arrive."""
        barrier = self._barrier(shared)
        barrier.left -= 128
        barrier.turn()
        self.switch()

    def arrive_copied(self, shared):
        barrier = self._barrier(shared)
        for target, found in self.open:
            self._bring(barrier, target, found, 0, 0)
        self.open.clear()
        self._bring(barrier, None, None, 32, 0)

    def bulk_copy(self, descriptor, at, shared, target):
        found = descriptor.read(at)
        assert target.array.shape == found.shape
        assert target.offset % 128 == 0, "bulk copies go to multiples of 128 bytes"
        self._bring(self._barrier(shared), target, found, 0, found.nbytes)

    def wait(self, shared, parity):
        self.switch(lambda: self._barrier(shared).passed(parity))

    def multiply(self, a, shared, acc, use_acc=True, is_async=False):
        def product():
            left = a.array if isinstance(a, Shared) else a
            begin = acc() if callable(acc) else acc  # a product that is under way itself
            return _mma(left, shared.array, begin if use_acc else np.zeros_like(begin))

        if self.timing.late:
            return product
        found = product()
        return lambda: found

    def wait_products(self, outstanding, deps):
        """Products in the order in which they were asked for: all but the last `outstanding` are there."""
        there = len(deps) - outstanding
        found = tuple(product() if i < there else product for i, product in enumerate(deps))
        return found if len(found) > 1 else found[0]

    # Parts: one runs at a time, until it waits or arrives.

    def specialise(self, jobs, warps, registers):
        assert len(jobs) == len(warps) + 1 == len(registers) + 1
        threads = []
        for number, (function, arguments) in enumerate(jobs):
            self.parts[number] = None  # what it waits for
            threads.append(threading.Thread(target=self._part, args=(number, function, arguments)))
        self._choose()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed

    def _part(self, number, function, arguments):
        self.own.number = number
        try:
            self._until_turn(number)
            with np.errstate(invalid="ignore", over="ignore"):
                function(*arguments)
        except Exception as error:
            self.failed = self.failed or error
        with self.turn:
            del self.parts[number]
            self._choose()
            self.turn.notify_all()

    def _choose(self):
        if self.failed:
            return
        ready = [number for number, passes in self.parts.items() if passes is None or passes()]
        if self.parts and not ready:
            self.failed = AssertionError(f"all of {len(self.parts)} parts wait for barriers that nobody arrives at")
        self.running = self.chance.choice(ready) if ready else None

    def _until_turn(self, number):
        with self.turn:
            self.turn.wait_for(lambda: self.running == number or self.failed)
        if self.failed:
            raise self.failed

    def switch(self, passes=None):
        """Another part may run, and this one goes on when its turn comes and its barrier is passed."""
        number = self.own.number
        with self.turn:
            self.parts[number] = passes
            self._choose()
            self.turn.notify_all()
        self._until_turn(number)
        self.parts[number] = None


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
        nothing = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8)
        return Shared(nothing.view(dtype).reshape(shape), program.timing.late)

    def split(x):
        assert x.shape[-1] == 2
        return x[..., 0], x[..., 1]

    def fma(a, b, c):
        exact = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
        return _value(exact.astype(np.float32))

    def inline_asm_elementwise(asm, constraints, arguments, dtype, is_pure, pack):
        return tuple(map(_value, emulated_ptx.run(asm, arguments[0], len(dtype))))

    return types.SimpleNamespace(
        arange=lambda start, end, layout: _value(np.arange(start, end, dtype=np.int32)),
        full=lambda shape, value, dtype, layout: _value(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype, layout: _value(np.zeros(shape, dtype)),
        broadcast=np.broadcast_arrays,
        join=lambda a, b: _value(np.stack([a, b], axis=-1)),
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
        fma=fma, inline_asm_elementwise=inline_asm_elementwise, warp_specialize=program.specialise,
        split=split, load=load, store=store, allocate_shared_memory=allocate_shared_memory, constexpr=object,
        **dict.fromkeys(
            ("SliceLayout", "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "SwizzledSharedLayout",
             "NVMMADistributedLayout", "NVMMASharedLayout"), _layout
        ),
        **DTYPES,
    )  # fmt: skip


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
        "fence_async_shared": lambda: None,
        "arrive_copied": program.arrive_copied, "release": program.release, "warpgroup_mma": program.multiply,
        "warpgroup_mma_wait": program.wait_products, "bulk_copy": program.bulk_copy,
        "mbarrier": types.SimpleNamespace(
            init=program.init, expect=program.expect, wait=program.wait, MBarrierLayout=_layout
        ),
    }  # fmt: skip
    found = {}
    copy = types.FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    done[function] = copy
    for name, value in function.__globals__.items():
        if name in replaced:
            found[name] = replaced[name]
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

    def __init__(self, kernel, timing):
        self.kernel, self.timing = kernel, timing

    def __getitem__(self, grid):
        grid = (*grid, *(1,) * (3 - len(grid)))

        def launch(*arguments, num_warps=None, maxnreg=None, enable_fp_fusion=None, launch_pdl=None, **constants):
            arguments = [_argument(a) for a in arguments]
            with np.errstate(invalid="ignore", over="ignore"):
                for where in np.ndindex(grid):
                    program = Program(where, grid, self.timing)
                    _python(self.kernel.fn, program, {})(*arguments, **constants)

        return launch


def _argument(value):
    if isinstance(value, torch.Tensor):
        return Pointer(Buffer(value))
    return Descriptor(value) if isinstance(value, TensorDescriptor) else value


@contextmanager
def emulated(module, *kernels, timing=None):
    """Kernels of a module replaced by what runs them here."""
    timing = timing or Timing()
    with mock.patch.multiple(module, **{name: Emulated(getattr(module, name), timing) for name in kernels}):
        yield
