"""Text-only Qwen3.5, the hybrid of Gated DeltaNet and attention layers: its name -> a model class in vLLM's registry.

vLLM 0.23 has no text-only Qwen3.5. vLLM 0.32 has one, but builds the token embedding without the quantisation config, so an
embedding in PQ2 could not be loaded. `pq2.hybrid_model` is right in both; a model without PQ2 is served as vLLM's own class
serves it. Importing this module imports no model code, and neither does `register`: vLLM imports the class where it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm
from vllm.logger import init_logger
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, Qwen3_5ForConditionalGenerationConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ARCHITECTURE = "Qwen3_5ForCausalLM"
"""What `architectures` of a model's config.json says."""
MODULE = "pq2.hybrid_model"
CLASS = "PQ2Qwen3_5ForCausalLM"

# vLLM formats and shows only the loggers below its own name.
logger = init_logger("vllm.pq2.hybrid")


class TextOnlyConfig(Qwen3_5ForConditionalGenerationConfig):
    """What vLLM 0.32 does with the config of a text-only Qwen3.5, for versions that have no such entry.

    Without it `mamba_ssm_dtype` of the model would be ignored, and a checkpoint cut out of the multimodal model, whose rope
    parameters still name M-RoPE sections, would be refused.
    """

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Take the state's type from the model, and one-dimensional positions."""
        Qwen3_5ForConditionalGenerationConfig.verify_and_update_config(vllm_config)
        rope = getattr(vllm_config.model_config.hf_text_config, "rope_parameters", None)
        if rope is not None:
            rope.pop("mrope_section", None)
            rope.pop("mrope_interleaved", None)


def register() -> None:
    """Have vLLM serve `architectures: [Qwen3_5ForCausalLM]` with `pq2.hybrid_model`, and log why.

    A second call changes nothing.
    """
    there = ModelRegistry.models.get(ARCHITECTURE)
    if there is not None and getattr(there, "module_name", None) == MODULE:
        return
    why = (
        f"vLLM {vllm.__version__} has no text-only Qwen3.5"
        if there is None
        else f"in vLLM {vllm.__version__}'s own class the token embedding cannot be quantised"
    )
    ModelRegistry.register_model(ARCHITECTURE, f"{MODULE}:{CLASS}")
    MODELS_CONFIG_MAP.setdefault(ARCHITECTURE, TextOnlyConfig)
    logger.info("pq2: %s is served by %s.%s: %s", ARCHITECTURE, MODULE, CLASS, why)
