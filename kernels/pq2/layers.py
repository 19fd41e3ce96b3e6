"""vLLM's layers -> how each is stored, loaded and multiplied: the quantisation config `pq2` and its methods.

A weight is loaded as the blocks of the file, uint8 [N, K / 128 * 34], so that tensor parallelism cuts N by rows and K by
whole blocks. After loading, the same bytes are put in the prepared layout in place, so a head tied to the embedding shares
them.
"""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from pq2 import dispatch
from pq2 import format as pq2_format
from pq2.errors import FormatError, PathUnavailable
from pq2.quantize import check_rotation
from pq2.reference import dequantize
from pq2.switches import Choice

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

logger = init_logger("vllm.pq2")

NAME = "pq2"
_UNSET = 0xFF
KEYS = ("quant_method", "group_size", "rotation_block", "modules_to_not_convert")


class Pq2Config(QuantizationConfig):
    """`quantization_config` of a PQ2 model directory.

    Args:
        rotation_block: Size of the rotation of activations; None is none.
        modules_to_not_convert: Modules of the checkpoint whose weights are ordinary tensors.

    Raises:
        FormatError: Nothing is given: vLLM does so for `--quantization pq2` where config.json does not say pq2.
    """

    choice: Choice
    """The switches of this process; set when the plugin is registered."""

    def __init__(self, rotation_block: int | None = None, modules_to_not_convert: list[str] | None = None) -> None:
        super().__init__()
        if modules_to_not_convert is None:
            raise FormatError(
                "--quantization pq2: config.json has no quantization_config, so this is no PQ2 model; make one of it with "
                "python -m pq2.convert, or leave the option out"
            )
        self.rotation = rotation_block or 0
        self.modules_to_not_convert = modules_to_not_convert

    def __repr__(self) -> str:
        # Not the switches: vLLM tells this as part of its configuration, which an A/B of a switch must find the same.
        return f"Pq2Config(rotation_block={self.rotation or None})"

    @classmethod
    def get_name(cls) -> str:
        """The name in config.json."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of activations that the kernels read and write."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Triton's: Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file besides config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Pq2Config:
        """Read `quantization_config`.

        Raises:
            FormatError: An unknown key, or a value that is not supported.
            PathUnavailable: vLLM is to give a row the same bits in every batch, which the kernels do not.
        """
        if envs.VLLM_BATCH_INVARIANT and cls.choice.kernel_set != "reference":
            raise PathUnavailable(
                "VLLM_BATCH_INVARIANT=1: these kernels add up one row of activations in another order than several; unset "
                "it, or set PQ2_KERNELS=reference"
            )
        unknown = sorted(set(config) - set(KEYS))
        if unknown:
            raise FormatError(f"quantization_config: {', '.join(unknown)}: unknown; pq2 has {', '.join(KEYS)}")
        group_size = config.get("group_size", pq2_format.GROUP)
        if group_size != pq2_format.GROUP:
            raise FormatError(f"quantization_config: group_size {group_size}: pq2 has {pq2_format.GROUP}")
        rotation = config.get("rotation_block")
        if rotation is not None and (type(rotation) is not int or rotation <= 0 or rotation & (rotation - 1)):
            raise FormatError(f"quantization_config: rotation_block {rotation!r}: a power of two, or null")
        names = config.get("modules_to_not_convert") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise FormatError(f"quantization_config: modules_to_not_convert {names!r}: a list of names of modules")
        return cls(rotation, list(names))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Name modules as the model does, whose names may differ from the checkpoint's: as their tensors are renamed."""
        tensors = hf_to_vllm_mapper.apply_list([f"{name}.weight" for name in self.modules_to_not_convert])
        self.modules_to_not_convert = [name.removesuffix(".weight") for name in tensors]

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer is stored and multiplied; None where vLLM's own way holds (attention)."""
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding)):
            return None
        skipped = is_layer_skipped(prefix, self.modules_to_not_convert, self.packed_modules_mapping)
        if isinstance(layer, VocabParallelEmbedding):
            return UnquantizedEmbeddingMethod() if skipped else Pq2EmbeddingMethod(self, prefix)
        if not skipped:
            return Pq2LinearMethod(self, prefix)
        return SmallLinearMethod() if self.choice.on("small_gemm") else UnquantizedLinearMethod()


@functools.cache
def _tell_once() -> None:
    """Say that this model runs without kernels."""
    logger.warning(
        "pq2: none of its kernels run here: products go through PyTorch, on dense float32 copies of the weights"
    )


def _once(layer: Module, weight_loader: Any) -> Any:
    """A weight loader that refuses a layer in the prepared layout: blocks copied over it would be noise, unseen.

    It asks the layer: vLLM's own reload loads into new tensors, and would leave a dense copy of the old weights in use.
    """

    def load(param: Parameter, *args: Any, **kwargs: Any) -> Any:
        if getattr(layer, "pq2_prepared", False):
            raise FormatError("PQ2 weights cannot be loaded over those of a running model: start a new server")
        return weight_loader(param, *args, **kwargs)

    return load


def _blocks(rows: int, k: int) -> torch.Tensor:
    """Room for blocks, filled with what no block is: vLLM does not notice a tensor that a checkpoint lacks."""
    return torch.full((rows, pq2_format.block_rows(k)), _UNSET, dtype=torch.uint8)


def _check_loaded(blocks: torch.Tensor, name: str) -> None:
    """Whether every row came from the checkpoint, and is whole.

    Raises:
        FormatError: A row is missing, or a block is damaged.
    """
    missing = (blocks == _UNSET).all(dim=-1)
    if bool(missing.any()):
        raise FormatError(
            f"{name}: {int(missing.sum())} of {blocks.shape[0]} rows, from row {int(missing.nonzero()[0])} on, are not in "
            "the checkpoint; is this module, or one that vLLM fuses into it, missing there or listed in "
            "modules_to_not_convert?"
        )
    pq2_format.check_blocks(blocks, name)


class _Weight:
    """What linear layers, the embedding and the head share: blocks in, the prepared layout after loading, one product."""

    def __init__(self, config: Pq2Config, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        self.rotation = config.rotation
        self.dummy = get_current_vllm_config().load_config.load_format == "dummy"

    def _create(self, layer: Module, k: int, whole_k: int, dtype: torch.dtype) -> None:
        """Check that K can be stored and cut so, and make room for the signs of a rotation.

        Raises:
            FormatError: K, or the part of it that a tensor-parallel rank has, is no multiple of 128 or of the rotation.
        """
        if whole_k % pq2_format.GROUP == 0 and k % pq2_format.GROUP:
            raise FormatError(
                f"{self.prefix}: K is {whole_k}, and {whole_k // k} tensor-parallel ranks would cut it within a group of "
                f"{pq2_format.GROUP} weights; use fewer ranks"
            )
        pq2_format.groups(k, f"{self.prefix}: K")
        layer.pq2_k = k
        layer.pq2_dtype = dtype
        if not self.rotation:
            layer.signs = None
            return
        check_rotation(whole_k, self.rotation, whole_k // k, self.prefix)
        signs = Parameter(torch.zeros(k, dtype=torch.int8), requires_grad=False)
        set_weight_attrs(signs, {"weight_loader": _once(layer, self._signs_loader(layer, whole_k))})
        layer.register_parameter("signs", signs)

    def _signs_loader(self, layer: Module, whole_k: int) -> Any:
        def load(param: Parameter, loaded: torch.Tensor, shard_id: Any = None) -> None:
            # Modules that vLLM fuses share their input, so their signs must be the same.
            if loaded.numel() != whole_k or not bool((loaded.abs() == 1).all()):
                raise FormatError(
                    f"{self.prefix}: signs are {whole_k} values of +1 and -1, this is {list(loaded.shape)}"
                )
            k = param.numel()
            mine = loaded.flatten()[layer.tp_rank * k :][:k] if k != whole_k else loaded.flatten()
            mine = mine.to(param.dtype)
            if bool(param.any()) and not torch.equal(param.data.cpu(), mine.cpu()):
                raise FormatError(f"{self.prefix}: the modules that vLLM fuses here ({shard_id}) have different signs")
            param.data.copy_(mine)

        return load

    def process_weights_after_loading(self, layer: Module) -> None:
        """Put the loaded blocks in the prepared layout, in place; draw them first where weights are made up.

        Raises:
            FormatError: A block is damaged, or the signs of a rotation are missing.
        """
        weight = layer.weight
        n, k = weight.shape[0], layer.pq2_k
        if self.dummy and layer.signs is not None:
            layer.signs.data.copy_(torch.arange(k, device=layer.signs.device) % 3 // 2 * -2 + 1)
        if not getattr(weight, "pq2_prepared", False):  # a tied head finds the embedding's done
            if self.dummy:
                prepared = pq2_format.random(n, k, weight.device, seed=zlib.crc32(self.prefix.encode()))
            else:
                _check_loaded(weight.data, f"{self.prefix}.weight")
                prepared = pq2_format.prepare(weight.data)
            weight.data.view(-1).copy_(prepared.data)
            weight.pq2_prepared = True
            weight.pq2_signs = layer.signs
        if layer.signs is not None and not bool(layer.signs.any()):
            if weight.pq2_signs is layer.signs:
                raise FormatError(
                    f"{self.prefix}: the model is rotated, and this module has no signs ({self.prefix}.signs)"
                )
            layer.signs = weight.pq2_signs  # a tied head has those of the embedding
        layer.pq2_prepared = True
        prepared = pq2_format.complete(pq2_format.view(weight.data.view(-1), n, k))
        if self.config.choice.kernel_set == "reference":
            _tell_once()
            layer.register_buffer("pq2_dense", dequantize(prepared, torch.float32), persistent=False)
        else:
            dispatch.warm_up(prepared, layer.pq2_dtype, self.config.choice, layer.signs, self.rotation)

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Activations [..., K] -> [..., N]: of a head, hidden states -> logits."""
        rows = x.reshape(-1, x.shape[-1])
        if self.config.choice.kernel_set == "reference":
            out = torch.ops.pq2.reference_linear(rows, layer.pq2_dense, layer.signs, self.rotation)
        else:
            out = torch.ops.pq2.linear(rows, layer.weight, layer.signs, layer.pq2_k, self.rotation)
        if bias is not None:
            out = out + bias
        return out.reshape(*x.shape[:-1], out.shape[-1])


@register_weight_loader_v2_supported_method
class Pq2LinearMethod(_Weight, LinearMethodBase):
    """A ternary linear layer: merged, column-parallel, row-parallel or replicated."""

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Room for the blocks of this rank's part; see `_create` for the errors."""
        self._create(layer, input_size_per_partition, input_size, params_dtype)
        rows = sum(output_partition_sizes)
        weight = ModelWeightParameter(
            data=_blocks(rows, input_size_per_partition),
            input_dim=1,
            output_dim=0,
            weight_loader=_once(layer, extra_weight_attrs.pop("weight_loader")),
        )
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)


class Pq2EmbeddingMethod(_Weight, QuantizeMethodBase):
    """A ternary token embedding or head."""

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Room for the blocks of this rank's part of the vocabulary."""
        self._create(layer, input_size_per_partition, input_size, params_dtype)
        rows = sum(output_partition_sizes)
        weight = Parameter(_blocks(rows, input_size_per_partition), requires_grad=False)
        loader = _once(layer, extra_weight_attrs.pop("weight_loader"))
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, "weight_loader": loader, **extra_weight_attrs})
        layer.register_parameter("weight", weight)

    def embedding(self, layer: Module, input_: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> rows [..., K]."""
        rows = torch.ops.pq2.embedding(
            input_.reshape(-1), layer.weight, layer.signs, layer.pq2_k, self.rotation, layer.pq2_dtype
        )
        return rows.reshape(*input_.shape, layer.pq2_k)


class SmallLinearMethod(UnquantizedLinearMethod):
    """An unquantised projection that `small_gemm` takes where it is small enough, and vLLM's own product where not."""

    def process_weights_after_loading(self, layer: Module) -> None:
        """Counters beside the weight, if it is small, and its kernel compiled: no request waits for a compiler."""
        from pq2 import small_gemm

        super().process_weights_after_loading(layer)
        weight = layer.weight
        n, k = weight.shape
        arrived = small_gemm.counters(n, weight.device) if small_gemm.fits(1, n) else None
        layer.register_buffer("pq2_arrived", arrived, persistent=False)
        if arrived is not None:
            # The kernel is one for any number of rows.
            row = torch.ones(1, k, dtype=weight.dtype, device=weight.device)
            small_gemm.small_gemm(row, weight, arrived, None if layer.skip_bias_add else layer.bias)

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Activations [..., K] -> [..., N]."""
        if layer.pq2_arrived is None:
            return super().apply(layer, x, bias)
        out = torch.ops.pq2.small_linear(x.reshape(-1, x.shape[-1]), layer.weight, layer.pq2_arrived, bias)
        return out.reshape(*x.shape[:-1], out.shape[-1])
