"""Does one thing with vLLM and the hybrid model class in a process of its own, and prints what came of it as JSON.

    python hybrid_driver.py register | build DIR | serve DIR

A process of its own because vLLM's registries and process groups are global, and a class must be registered before any
process inspects it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm

from pq2 import hybrid

PROMPT = "A horse, a kingdom; and again: a horse."


def register() -> dict[str, Any]:
    """Register twice, and see what that imported and left in the registry."""
    from vllm.model_executor.models import ModelRegistry

    there = ModelRegistry.models.get(hybrid.ARCHITECTURE)
    lines: list[str] = []
    hybrid.logger.info = lambda message, *values: lines.append(message % values)
    hybrid.register()
    hybrid.register()
    model = ModelRegistry.models[hybrid.ARCHITECTURE]
    return {
        "before": there is not None,
        "version": vllm.__version__,
        "registered": f"{model.module_name}:{model.class_name}",
        "lines": lines,
        "imported": [
            name for name in ("vllm.model_executor.models.qwen3_5", "pq2.hybrid_model") if name in sys.modules
        ],
    }


def build(folder: str) -> dict[str, Any]:
    """Build the model with a quantisation config that records what it is asked, load its weights, and compare them."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    asked = _register_recorder()
    hybrid.register()
    config = EngineArgs(model=folder, enforce_eager=True, max_model_len=256, dtype="bfloat16").create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
        weights = list(get_model_loader(config.load_config).get_all_weights(config.model_config, model))
        loaded = model.load_weights(iter(weights))
    parameters = dict(model.named_parameters())
    return {
        "class": type(model).__name__,
        "hybrid": config.model_config.is_hybrid,
        "asked": asked,
        "embedding": type(model.model.embed_tokens.quant_method).__name__,
        "missing": sorted(set(parameters) - set(loaded)),
        "wrong": _wrong(parameters, dict(weights)),
        "types": {name: str(parameter.dtype) for name, parameter in parameters.items()},
    }


def serve(folder: str) -> dict[str, Any]:
    """The log-probability of each token of a prompt, from vLLM and from transformers."""
    import transformers

    hybrid.register()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPT).input_ids
    llm = vllm.LLM(folder, enforce_eager=True, max_model_len=256, max_num_seqs=2, kv_cache_memory_bytes=256 << 20)
    output = llm.generate(
        {"prompt_token_ids": tokens},
        vllm.SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True),
    )[0]
    served = [place[token].logprob for place, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    own = logits.gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1).tolist()
    return {"served": served, "transformers": own, "new_tokens": len(output.outputs[0].token_ids)}


def _register_recorder() -> list[tuple[str, str]]:
    """A config named pq2 that keeps blocks as they are, and the list in which it writes every question."""
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.utils import set_weight_attrs

    asked: list[tuple[str, str]] = []

    class Blocks(LinearMethodBase):
        def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *_sizes, **attributes):
            shape = sum(output_partition_sizes), input_size_per_partition // 128 * 34
            weight = torch.nn.Parameter(torch.full(shape, 255, dtype=torch.uint8), requires_grad=False)
            set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, "weight_loader": attributes["weight_loader"]})
            layer.register_parameter("weight", weight)

        def apply(self, layer, x, bias=None):
            raise NotImplementedError

        def embedding(self, layer, x):
            raise NotImplementedError

    class Recorder(QuantizationConfig):
        rotation = 0

        def __init__(self, unconverted):
            super().__init__()
            self.unconverted = unconverted

        def get_name(self):
            return "pq2"

        def get_supported_act_dtypes(self):
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls):
            return 0

        @staticmethod
        def get_config_filenames():
            return []

        @classmethod
        def from_config(cls, config):
            return cls(config["modules_to_not_convert"])

        def get_quant_method(self, layer, prefix):
            asked.append((type(layer).__name__, prefix))
            if isinstance(layer, LinearBase):
                left = is_layer_skipped(prefix, self.unconverted, self.packed_modules_mapping)
                return UnquantizedLinearMethod() if left else Blocks()
            if isinstance(layer, VocabParallelEmbedding) and prefix not in self.unconverted:
                return Blocks()
            return None

    register_quantization_config("pq2")(Recorder)
    return asked


def _wrong(parameters: dict[str, torch.nn.Parameter], weights: dict[str, torch.Tensor]) -> list[str]:
    """Parameters that are not the tensors of the checkpoint, one below the other."""
    from pq2.selection import FUSED_INTO

    parts: dict[str, list[torch.Tensor]] = {}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        fused = f"{parent}.{FUSED_INTO[last]}.{kind}" if last in FUSED_INTO else name
        parts.setdefault(fused, []).append(weight)
    wrong = sorted(set(parts) ^ set(parameters))
    # The order within a fused matrix is vLLM's: queries, keys, values; q, k, v, then z; b, then a; gate, then up.
    order = ("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "gate_proj", "up_proj")
    for name in set(parts) & set(parameters):
        members = [member for member in order if FUSED_INTO[member] == name.split(".")[-2]] if "." in name else []
        below = [weights[name.replace(f".{FUSED_INTO[member]}.", f".{member}.")] for member in members] or parts[name]
        expected = torch.cat(below)
        # An embedding is padded to a multiple of 64 rows.
        found = parameters[name].data[: len(expected)]
        if not torch.equal(found.float().reshape(expected.shape), expected.float()):
            wrong.append(name)
    return wrong


if __name__ == "__main__":
    result = {"register": register, "build": build, "serve": serve}[sys.argv[1]](*sys.argv[2:-1])
    Path(sys.argv[-1]).write_text(json.dumps(result))
