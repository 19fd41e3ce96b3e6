"""Trains the tiny ternary model and writes it in PQ2: `python train.py --out DIR`, minutes on one GPU.

    PYTHONPATH=kernels python experiments/tiny/train.py --out /tmp/tiny --seed 0

A transformer of Qwen3's architecture, whose matrices are ternary in groups of 128 along K and whose activations are int8
in the same groups, while it is trained as when it is served (straight-through estimators, as in BitNet b1.58, Ma et al.
2024). What is exported is what was trained: `pq2.convert` loses nothing of weights that are ternary already, and that is
checked.

Needs torch, transformers, tokenizers and safetensors, and `pq2` on the path.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from problems import Problem, problems
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from pq2 import format as pq2_format
from pq2.convert import main as convert

VOCABULARY = 512
END, PAD = "<|endoftext|>", "<|pad|>"
GROUP = pq2_format.GROUP
LEAST_SCALE = 2.0**-14
"""The smallest normal fp16: a group's scale is stored as such."""


class _Ternary(torch.autograd.Function):
    """A weight -> the ternary one that is served; gradients pass as if nothing had happened."""

    @staticmethod
    def forward(_ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        wide = weight.float().reshape(-1, GROUP)
        scale = wide.abs().mean(dim=-1, keepdim=True).clamp(min=LEAST_SCALE).half().float()
        return ((wide / scale).round().clamp(-1, 1) * scale).reshape(weight.shape)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Int8(torch.autograd.Function):
    """Activations -> those that the kernels multiply by: int8 in groups of 128, with a scale each."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().unflatten(-1, (-1, GROUP))
        scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
        return ((wide / scale).round() * scale).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class TernaryLinear(nn.Linear):
    """A linear layer as PQ2 serves it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [..., K] -> [..., N]."""
        return nn.functional.linear(_Int8.apply(x), _Ternary.apply(self.weight).to(x.dtype))


class TernaryEmbedding(nn.Embedding):
    """A token embedding as PQ2 serves it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> rows [..., K]."""
        return nn.functional.embedding(ids, _Ternary.apply(self.weight))


def text_of(problem: Problem) -> tuple[str, str]:
    """What is given and what is to be learnt: the prompt of a GSM8K check in completion style, and its answer."""
    return f"Question: {problem.question}\nAnswer:", f" {problem.answer}"


def make_tokenizer(sample: Sequence[Problem]) -> Any:
    """Byte-level BPE, every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("".join(text_of(one)) for one in sample), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    # The prompt of the completion style, whatever the turns.
    fast.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}Question: {{ message['content'] }}\nAnswer:"
        "{% else %} {{ message['content'] }}\n\n{% endif %}{% endfor %}"
    )
    return fast


def make_model(hidden: int, layers: int, vocabulary: int) -> Any:
    """The model, its matrices replaced by ternary ones; the head is the embedding."""
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // GROUP * GROUP,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TernaryLinear
        elif type(module) is nn.Embedding:
            module.__class__ = TernaryEmbedding
    return model


def encode(tokenizer: Any, found: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Problems -> token ids [problems, longest], padded, and labels: the answers' tokens, -100 elsewhere."""
    texts = [text_of(one) for one in found]
    prompts = tokenizer([prompt for prompt, _ in texts], add_special_tokens=False).input_ids
    answers = tokenizer([answer for _, answer in texts], add_special_tokens=False).input_ids
    rows = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id, dtype=torch.int16)
    labels = torch.full((len(rows), longest), -100, dtype=torch.int16)
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        ids[place, : len(row)] = torch.tensor(row, dtype=torch.int16)
        labels[place, len(prompt) : len(row)] = ids[place, len(prompt) : len(row)]
    return ids, labels


def batches(
    ids: torch.Tensor, labels: torch.Tensor, size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end, in an order of the seed, each cut to its longest row."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(ids), generator=generator)
        for at in range(0, len(order) - size + 1, size):
            chosen = order[at : at + size]
            longest = int((labels[chosen] != -100).any(dim=0).nonzero().max()) + 1
            yield ids[chosen, :longest].long(), labels[chosen, :longest].long()


def train(model: Any, ids: torch.Tensor, labels: torch.Tensor, given: argparse.Namespace) -> None:
    """AdamW with a warm-up and a cosine to zero; progress goes to stderr."""
    device = torch.device(given.device)
    model.to(device).train()
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=given.learning_rate,
        betas=(0.9, 0.98),
    )
    warm = min(200, given.steps // 10 + 1)

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, given.steps - warm)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    began = time.monotonic()
    stream = batches(ids, labels, given.batch, given.seed)
    for step, (x, y) in enumerate(itertools.islice(stream, given.steps)):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=x.to(device)).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), y[:, 1:].to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == given.steps - 1:
            sys.stderr.write(f"step {step}: loss {float(loss):.4f}, {time.monotonic() - began:.0f} s\n")
            sys.stderr.flush()


@torch.no_grad()
def right(model: Any, tokenizer: Any, asked: Sequence[Problem], device: str) -> int:
    """How many of some problems are answered with the right number, greedily, one at a time as a server would."""
    model.to(device).eval()
    good = 0
    for one in asked:
        prompt, answer = text_of(one)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(device)
        out = model.generate(
            ids, max_new_tokens=200, do_sample=False, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, attention_mask=torch.ones_like(ids),
        )  # fmt: skip
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        good += text.rpartition("####")[2].strip() == answer.rpartition("####")[2].strip()
    return good


def export(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the model in PQ2, and look that it is the one that was trained.

    Raises:
        SystemExit: The directory is there, or a weight is not the trained one.
    """
    served = {
        name: _Ternary.apply(value.detach()) if value.ndim == 2 else value.detach()
        for name, value in model.named_parameters()
    }
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        plain = transformers.Qwen3ForCausalLM(model.config)
        plain.load_state_dict({name: value.cpu() for name, value in served.items()}, strict=False)
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
        plain.save_pretrained(source)
        tokenizer.save_pretrained(source)
        if convert([str(source), str(out)]):
            raise SystemExit("train.py: pq2.convert refused the model")
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    for name, wanted in served.items():
        if wanted.ndim != 2:
            continue
        codes, scales = pq2_format.unpack(stored[name])
        got = (codes.float() - 1).reshape(-1, GROUP) * scales.float().reshape(-1, 1)
        if not torch.equal(got.reshape(wanted.shape), wanted.cpu()):
            raise SystemExit(f"train.py: {name} is not what was trained")


def main() -> int:
    """Train, ask, export."""
    parser = argparse.ArgumentParser(description="Train the tiny ternary model.")
    parser.add_argument("--out", type=Path, required=True, help="new folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=400_000, help="trained on, default: 400000")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=384, help="problems a step")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--asked", type=int, default=128, help="held-out problems asked at the end, of another seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists")
    torch.manual_seed(given.seed)
    found = list(itertools.islice(problems(given.seed, held_out=False), given.problems))
    tokenizer = make_tokenizer(found[:20_000])
    ids, labels = encode(tokenizer, found)
    model = make_model(given.hidden, given.layers, len(tokenizer))
    count = sum(one.numel() for one in model.parameters())
    sys.stderr.write(f"{count / 1e6:.1f} M weights, {len(ids)} problems of at most {ids.shape[1]} tokens\n")
    began = time.monotonic()
    train(model, ids, labels, given)
    took = time.monotonic() - began
    asked = list(itertools.islice(problems(given.seed + 1000, held_out=True), given.asked))
    good = right(model, tokenizer, asked, given.device)
    export(model, tokenizer, given.out)
    size = sum(path.stat().st_size for path in given.out.iterdir())
    told = {
        "weights": count, "problems": given.problems, "steps": given.steps, "batch": given.batch, "seed": given.seed,
        "learning_rate": given.learning_rate, "seconds": round(took), "asked": given.asked, "right": good, "bytes": size,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
