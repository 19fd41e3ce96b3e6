"""Functions for layers that are not quantised: what they compute, and what vLLM runs for them on CUDA (cuBLAS)."""

from __future__ import annotations

import torch

from .layers import Call, Layer, Refused


def linear(layer: Layer) -> Call:
    """`torch.nn.functional.linear` with the layer's own weight."""
    weight, bias = _weight(layer), _bias(layer)
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def reference(layer: Layer) -> Call:
    """The same in float64."""
    weight, bias = _weight(layer).double(), _bias(layer)
    added = None if bias is None else bias.double()
    return lambda x: torch.nn.functional.linear(x.double(), weight, added)


def weights(layer: Layer, seed: int) -> dict[str, torch.Tensor]:
    """A random weight whose results are of the size of the inputs; the bias, where there is one, likewise."""
    generator = torch.Generator(device=layer.device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=layer.device, dtype=layer.dtype)

    made = {"weight": noise(layer.n, layer.k).mul_(layer.k**-0.5)}
    return made | ({"bias": noise(layer.n)} if layer.bias else {})


def _weight(layer: Layer) -> torch.Tensor:
    weight = layer.tensors.get("weight")
    if weight is None or weight.shape != (layer.n, layer.k) or not weight.is_floating_point():
        found = "none" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise Refused(
            f"{layer.name} ({layer.method}): a dense weight is floating [{layer.n}, {layer.k}], found {found}; "
            "give functions of your own"
        )
    return weight


def _bias(layer: Layer) -> torch.Tensor | None:
    if not layer.bias:
        return None
    if "bias" not in layer.tensors:
        raise Refused(f"{layer.name}: it adds a bias, and the capture has none")
    return layer.tensors["bias"]
