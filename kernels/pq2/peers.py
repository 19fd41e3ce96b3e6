"""Whom the benchmark measures beside us: kernels of others for 2-bit weights, by their own calls, on the weights of ours.

| name | kernels | activations | compared with |
| --- | --- | --- | --- |
| `humming-w2a8` | humming-kernels, as it ships | int8, a scale for each row | the product of the same int8 values |
| `humming-w2a8-g128` | the same | int8, a scale for every 128 | our reference: they are our numerics |
| `humming-w2a16` | the same | bf16 | the product of x as it is |
| `gemlite-a16w2` | gemlite, in its fast mode | bf16 | the product of x as it is |

humming quantises by a kernel of its own: NAME is the product alone, `NAME+quantise` both. It is launched for a number of
rows as its table of defaults says; only that entry is compiled. gemlite times its candidates itself, when it first meets a
shape and a number of rows.

Every peer is given the ternary values and the scales of our weights. All of them keep scales in bf16, which is a part of
their error, and 2.125 bits a weight. What cannot take part, by raising or by a wrong result, is left out and told; it
never ends the measurement. None of the packages is needed: they are imported when a measurement begins.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pq2 import quantize, timing
from pq2.errors import PathUnavailable
from pq2.format import GROUP, Prepared, unpack_codes

QUANTISING = 2e-2
"""Relative error allowed to the int8 activations of a peer: with a scale for a row of noise it is 1e-2."""


class Package(NamedTuple):
    """A distribution, what it is imported as, and the version that this file was written for."""

    name: str
    module: str
    version: str


class Ready(NamedTuple):
    """A peer's products of some activations and the copies of a weight.

    Attributes:
        calls: Name -> the product with the copy of that number, [M, N].
        nbytes: Bytes of one copy, as the peer keeps it.
        taken: The activations that it multiplies by, float64 [M, K].
    """

    calls: dict[str, Callable[[int], torch.Tensor]]
    nbytes: int
    taken: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Peer(abc.ABC):
    """Kernels of others.

    Attributes:
        name: What they are called in results.
        package: Where they come from.
        against: The activations of the product that theirs is compared with.
        tolerance: The relative error allowed.
        why: Why that much.
    """

    name: str
    package: Package
    against: str
    tolerance: float
    why: str

    @abc.abstractmethod
    def prepare(self, weights: Sequence[Prepared], x: torch.Tensor) -> Ready:
        """Copies of a weight in the peer's format, and the calls that multiply x, bf16 [M, K], by them.

        Raises:
            Exception: Whatever the peer raises: it cannot take this product.
        """


def humming_words(weight: Prepared) -> torch.Tensor:
    """Codes as humming packs them, int32 [N, K / 16]: bits in the order of ours, and -1, 0, 1 are 1, 2, 3."""
    return (weight.codes + 0x55).view(torch.int32)  # 1 more for each of four codes, none of which is 3


@dataclasses.dataclass(frozen=True)
class Humming(Peer):
    """HummingLayer of humming-kernels; `inputs` is its input_config."""

    inputs: Mapping[str, Any]

    def layer(self, weight: Prepared) -> Any:
        """A layer with our weight, ready to multiply."""
        from humming.layer import HummingLayer

        n, k = weight.shape
        with torch.device(weight.data.device):
            layer = HummingLayer(
                n, k, weight_config={"dtype": "uint2", "group_size": GROUP}, input_config=dict(self.inputs),
                torch_dtype=torch.bfloat16,
            )  # fmt: skip
        layer.load_from_tensors({"weight": humming_words(weight), "weight_scale": weight.scales})
        layer.transform()
        return layer

    def prepare(self, weights: Sequence[Prepared], x: torch.Tensor) -> Ready:
        """See `Peer`."""
        from humming.forward import may_quant_input
        from humming.tune import get_heuristics_config

        layers = [self.layer(weight) for weight in weights]
        config = layers[0].humming_config
        tuning = json.dumps(get_heuristics_config(config, shape_m=x.shape[0], device=x.device))
        q, scales = may_quant_input(config, x)  # bf16 comes back as it is, without scales
        out = torch.empty(x.shape[0], layers[0].shape_n, dtype=x.dtype, device=x.device)

        def product(copy: int) -> torch.Tensor:
            layers[copy](q, outputs=out, input_scale=scales, tuning_config=tuning)
            return out

        def whole(copy: int) -> torch.Tensor:
            layers[copy](x, outputs=out, tuning_config=tuning)
            return out

        nbytes = sum(tensor.nbytes for tensor in layers[0].parameters())
        if scales is None:
            return Ready({self.name: product}, nbytes, x.double())
        taken = rescaled(q, scales)
        error = timing.deviation(taken, x.double())
        if not error < QUANTISING:
            raise PathUnavailable(f"its quantised activations are off by {error:.2e}, allowed {QUANTISING:.0e}")
        if scales.shape[1] > 1:  # those of our reference, not its own
            taken = quantize.dequantize(quantize.quantize(x))
        return Ready({self.name: product, f"{self.name}+quantise": whole}, nbytes, taken)


def rescaled(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What int8 activations [M, K] with scales [M, groups] stand for: float64 [M, K]."""
    m, k = q.shape
    groups = scales.shape[1]
    return (q.double().reshape(m, groups, k // groups) * scales.double().unsqueeze(-1)).reshape(m, k)


@dataclasses.dataclass(frozen=True)
class Gemlite(Peer):
    """GemLiteLinear of gemlite, weights of 2 bits and activations of 16."""

    def layer(self, weight: Prepared) -> Any:
        """A layer with our weight, ready to multiply."""
        from gemlite import DType, GemLiteLinear

        n, k = weight.shape
        layer = GemLiteLinear(
            2, group_size=GROUP, in_features=k, out_features=n, input_dtype=DType.BF16, output_dtype=DType.BF16
        )
        # A value is code - 1; scales are bf16, as gemlite's own classes make them for bf16.
        return layer.pack(unpack_codes(weight.codes), weight.scales.to(torch.bfloat16), 1, None)

    def prepare(self, weights: Sequence[Prepared], x: torch.Tensor) -> Ready:
        """See `Peer`."""
        from gemlite import forward_functional

        layers = [self.layer(weight) for weight in weights]
        arguments = [(layer.get_tensor_args(), layer.get_meta_args()) for layer in layers]

        def product(copy: int) -> torch.Tensor:
            result: torch.Tensor = forward_functional(x, None, *arguments[copy])
            return result

        nbytes = sum(tensor.nbytes for tensor in (layers[0].W_q, layers[0].scales, layers[0].zeros))
        return Ready({self.name: product}, nbytes, x.double())


HUMMING = Package("humming-kernels", "humming", "0.1.20")
GEMLITE = Package("gemlite", "gemlite", "0.6.0.post2")
OF_BF16 = (timing.TOLERANCE, "scales and results in bf16 make 3e-3")
OF_ATOMICS = (5e-2, "up to K / 32 parts of a result are added in bf16, by atomics, which makes 3e-2")
ALL: tuple[Peer, ...] = (
    Humming("humming-w2a8", HUMMING, "quantised by the row", *OF_BF16, {"dtype": "int8"}),
    Humming("humming-w2a8-g128", HUMMING, "quantised per 128", *OF_BF16, {"dtype": "int8", "group_size": GROUP}),
    Humming("humming-w2a16", HUMMING, "bf16", *OF_BF16, {"dtype": "bfloat16"}),
    Gemlite("gemlite-a16w2", GEMLITE, "bf16", *OF_ATOMICS),
)
NAMES = tuple(peer.name for peer in ALL)


class Timed(NamedTuple):
    """A product of a peer that is right: what is timed.

    Attributes:
        call: On the copy with that number.
        copies: How many there are.
        nbytes: Bytes of one copy, as the peer keeps it.
        rel_err: The relative error.
        against: The activations of the product that it is compared with.
    """

    call: timing.Call
    copies: int
    nbytes: int
    rel_err: float
    against: str


class Peers:
    """The peers of a run: those that are here, and why others are not.

    Attributes:
        here: Those that are installed, in their order.
        versions: Name -> package and version.
        left_out: Name, or name and product -> the reason; told on standard error too.
    """

    def __init__(self, candidates: Sequence[Peer] = ALL) -> None:
        self.here: list[Peer] = []
        self.versions: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        for peer in candidates:
            package = peer.package
            try:
                version = importlib.metadata.version(package.name)
            except importlib.metadata.PackageNotFoundError:
                how = f"pip install {package.name}=={package.version}"
                self.leave_out(peer.name, f"{package.name} is not installed here ({how})")
                continue
            self.here.append(peer)
            self.versions[peer.name] = f"{package.name} {version}"
            if version != package.version:
                tell(f"{peer.name} was written for {package.name} {package.version}, here is {version}")

    def leave_out(self, name: str, reason: str) -> None:
        """Note and tell why a peer, or one of its products, is not measured."""
        self.left_out[name] = reason
        tell(f"{name} is left out: {reason}")

    def begin(self) -> None:
        """Import the packages. One that does not load here is left out as a whole, and not product by product."""
        for peer in list(self.here):
            try:
                importlib.import_module(peer.package.module)
            except Exception as error:
                self.here.remove(peer)
                self.leave_out(peer.name, first_line(error))

    def products(self, weights: Sequence[Prepared], x: torch.Tensor) -> dict[str, Timed]:
        """The peers' products of activations and the copies of a weight: compiled, tuned, checked in a CUDA graph.

        A peer that raises, or is off, is left out of this product.
        """
        n, k = weights[0].shape
        found: dict[str, Timed] = {}
        for peer in self.here:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # what a peer has to say is no result
                    found |= _checked(peer, weights, x)
                if x.is_cuda:
                    torch.cuda.synchronize()  # a fault is told as the peer's
            except Exception as error:
                self.leave_out(f"{peer.name} {n}x{k} M={x.shape[0]}", first_line(error))
        return found


def _checked(peer: Peer, weights: Sequence[Prepared], x: torch.Tensor) -> dict[str, Timed]:
    """All of a peer's products, or none.

    Raises:
        PathUnavailable: One is off by more than its tolerance.
        Exception: Whatever the peer raises.
    """
    ready = peer.prepare(weights, x)
    last = len(weights) - 1
    wanted = timing.exact(ready.taken, weights[last])
    found = {}
    for name, call in ready.calls.items():
        error = timing.deviation(timing.replayed(functools.partial(call, last)), wanted)
        if not error < peer.tolerance:
            allowed = f"{peer.tolerance:.0e} is allowed: {peer.why}"
            raise PathUnavailable(f"{name} is off by {error:.2e} against the float64 reference; {allowed}")
        found[name] = Timed(call, len(weights), ready.nbytes, error, peer.against)
    return found


def first_line(error: Exception) -> str:
    """An error's kind and the first line of what it says."""
    said = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *said[:1]])


def tell(line: str) -> None:
    """A line for people."""
    print(f"pq2.bench: {line}", file=sys.stderr, flush=True)
