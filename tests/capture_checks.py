"""The capture plugin's recorder on a toy model, in the server's environment: run by `test_replay_capture`, not by pytest.

    python capture_checks.py SITE FOLDER

Every function `check_*` gets a folder of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from vllm import forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

sys.path.insert(0, sys.argv[1])

from abharness_capture.capture_files import Files
from abharness_capture.capture_recorder import Recorder
from abharness_capture.capture_status import Refused, Status

ROWS, K, N = 3, 8, 5


class Method(UnquantizedLinearMethod):
    """A product, and nothing else of vLLM's."""

    def __init__(self) -> None:
        self.prepared = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.prepared += 1

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, layer.weight, bias)


class Packing(Method):
    """As vLLM on a CPU: the weight goes into an object of its own."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.data
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, layer.packed, bias)


class InPlace(Method):
    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        y = super().apply(layer, x, bias)
        x.zero_()
        return y


class Linear(LinearBase):
    def __init__(
        self, method: Any, k: int = K, n: int = N, dtype: torch.dtype = torch.float32, bias: bool = False
    ) -> None:
        torch.nn.Module.__init__(self)
        self.input_size, self.output_size, self.tp_size = k, n, 1
        self.weight = torch.nn.Parameter(torch.randn(n, k, dtype=dtype), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(n, dtype=dtype), requires_grad=False) if bias else None
        self.quant_method = method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


class Head(VocabParallelEmbedding):
    """An embedding that is the head, too."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.embedding_dim, self.num_embeddings_per_partition, self.tp_size = K, 11, 1
        self.weight = torch.nn.Parameter(torch.randn(11, K), requires_grad=False)
        self.quant_method = Method()


class Toy(torch.nn.Module):
    def __init__(self, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.called = list(layers)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(self, name)(x.clone()) for name in self.called]


def decode(rows: int = ROWS, query: int = 1, at: int = 70) -> dict[str, Any]:
    one = SimpleNamespace(num_actual_tokens=rows, max_query_len=query, seq_lens=torch.full((rows,), at))
    return {"layers.0.attn": one, "layers.1.attn": one}


class Bench:
    """A recorder that listens to a toy model."""

    def __init__(self, folder: Path, model: torch.nn.Module, **config: Any) -> None:
        self.folder, self.model = folder, model
        self.config = {
            "output": str(folder), "layers": "", "rows": [ROWS], "steps": 2, "input_len": 64, "weights": "copy",
            "most_bytes": 2**20, **config,
        }  # fmt: skip
        self.status = Status(folder)
        self.recorder = Recorder(self.config, self.status, model, SimpleNamespace(dtype=torch.float32))
        with self.recorder.keeping_weights():
            for layer in model.modules():
                if hasattr(layer, "quant_method"):
                    layer.quant_method.process_weights_after_loading(layer)
        self.recorder.begin()
        self.arm(ROWS)

    def arm(self, rows: int) -> None:
        (self.folder / "armed").write_text(f"{rows}\n")

    def step(self, metadata: Any, rows: int = ROWS, after: Any = None, x: torch.Tensor | None = None) -> Any:
        """One forward pass, and what is called after it."""
        x = torch.randn(rows, K) if x is None else x
        forward_context._forward_context = SimpleNamespace(attn_metadata=metadata)
        try:
            found = self.model(x)
        finally:
            forward_context._forward_context = None
        if after is not None:
            after.quant_method.apply(after, torch.randn(rows, K))
        return found

    @property
    def told(self) -> Any:
        (path,) = self.folder.glob("status-*.json")
        return json.loads(path.read_text())


def check_a_decode_step_is_copied_whole_and_others_are_told(folder: Path) -> None:
    method = Method()
    model = Toy(a=Linear(method), b=Linear(method, bias=True))
    bench = Bench(folder, model)
    assert isinstance(method, UnquantizedLinearMethod)
    assert method.prepared == 2
    assert "process_weights_after_loading" not in vars(method)
    bench.step(None)
    bench.step(decode(query=64))
    bench.step(decode(at=64))
    bench.step(decode(rows=2), rows=2)
    x = torch.randn(ROWS, K)
    first = bench.step(decode(), x=x)
    bench.step(decode())
    bench.step(decode())  # ends the one before; two are enough
    model_ = bench.told["model"]
    assert bench.told["fault"] is None
    assert model_["order"] == ["a", "b"]
    assert [(one["n"], one["k"], one["bias"], one["loaded"]) for one in model_["layers"]] == [
        (N, K, False, False), (N, K, True, False)]  # fmt: skip
    assert model_["cells"]["3"]["steps"] == 2
    assert sum(model_["cells"]["3"]["seen"].values()) == 4
    assert model_["cells"]["3"]["seen"]["a step of 2 rows"] == 1
    tensors = load_file(folder / "rows-3.safetensors")
    assert sorted(tensors) == sorted(f"{p}.{t}.{s}" for p in (0, 1) for t in "xy" for s in (0, 1))
    assert torch.equal(tensors["0.x.0"], x)
    assert torch.equal(tensors["1.y.0"], first[1])
    weights = load_file(folder / "weights-00001.safetensors")
    assert sorted(weights) == ["a/weight", "b/bias", "b/weight"]
    assert torch.equal(weights["b/bias"], model.b.bias)


def check_nothing_is_taken_while_nothing_is_asked_for(folder: Path) -> None:
    bench = Bench(folder, Toy(a=Linear(Method())))
    (folder / "armed").unlink()
    for _ in range(4):
        bench.step(decode())
    assert bench.told["model"]["cells"]["3"] == {"steps": 0, "seen": {}, "discarded": {}}


def check_a_step_of_another_order_is_discarded_and_told(folder: Path) -> None:
    model = Toy(a=Linear(Method()), b=Linear(Method()))
    bench = Bench(folder, model, steps=3)
    bench.step(decode())
    model.called = ["b", "a"]
    bench.step(decode())
    model.called = ["a"]
    bench.step(decode())
    model.called = ["a", "b"]
    bench.step(decode())
    bench.step(None)
    cell = bench.told["model"]["cells"]["3"]
    assert (cell["steps"], sum(cell["discarded"].values())) == (2, 2)
    assert not (folder / "rows-3.safetensors").exists()


def check_the_head_is_called_after_the_forward_pass_and_belongs_to_its_step(folder: Path) -> None:
    head = Head()
    model = Toy(a=Linear(Method()))
    model.embed, model.head = head, head
    bench = Bench(folder, model)
    bench.step(decode(query=64), after=head)  # its head has as many rows, and is of no decode step
    bench.step(decode(), after=head)
    bench.step(decode(), after=head)
    bench.step(None)
    told = bench.told["model"]
    assert told["order"] == ["a", "embed"]
    assert told["cells"]["3"]["steps"] == 2
    assert told["layers"][1]["n"] == 11


def check_the_head_alone_can_be_captured(folder: Path) -> None:
    head = Head()
    model = Toy(a=Linear(Method()))
    model.embed, model.head = head, head
    bench = Bench(folder, model, layers="^head$")
    for _ in range(3):
        bench.step(decode(), after=head)
    told = bench.told["model"]
    assert (told["order"], told["cells"]["3"]["steps"]) == (["embed"], 2)


def check_an_embedding_that_is_no_head_is_no_linear_layer(folder: Path) -> None:
    model = Toy(a=Linear(Method()))
    model.embed = Head()
    bench = Bench(folder, model)
    assert list(bench.recorder.layers) == ["a"]
    assert bench.told["model"]["left_out"] == {}


def check_what_is_left_out_is_told_with_its_reason(folder: Path) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
            self.quant_method = Method()

        def forward(self, x: Any) -> Any:
            return x

    class Wider(Method):
        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return super().apply(layer, x, bias).double()

    class External(Linear):
        def forward(self, x: Any) -> Any:
            return self.quant_method.apply(self, x, torch.zeros(N))

    class Heads(Linear):
        def forward(self, x: Any) -> Any:
            return self.quant_method.apply(self, x.reshape(-1, 4))

    parts = Linear(Method())
    parts.tp_size = 2
    model = Toy(a=Linear(Method()), e=Experts(), w=Linear(Wider()), x=External(Method()), h=Heads(Method(), k=4), p=parts,
                never=Linear(Method()))  # fmt: skip
    model.called.remove("never")
    bench = Bench(folder, model)
    for _ in range(3):
        bench.step(decode())
    told = bench.told["model"]
    assert (told["order"], told["cells"]["3"]["steps"]) == (["a"], 2)
    assert told["left_out"] == {
        "e": "Experts is no linear layer",
        "w": "its result is float64, the model float32",
        "x": "the bias that is added is no tensor of the layer",
        "h": "its input has 6 rows in a step of 3",
        "p": "it is one part of 2",
        "never": "not called in a decode step",
    }
    assert sorted(load_file(folder / "weights-00001.safetensors")) == ["a/weight"]


def check_a_weight_that_is_packed_away_is_stored_as_loaded(folder: Path) -> None:
    model = Toy(a=Linear(Packing(), bias=True))
    loaded = model.a.weight.data.clone()
    bench = Bench(folder, model)
    for _ in range(3):
        bench.step(decode())
    (layer,) = bench.told["model"]["layers"]
    assert layer["loaded"] is True
    weights = load_file(folder / "weights-00001.safetensors")
    assert torch.equal(weights["a/weight"], loaded)
    assert sorted(weights) == ["a/bias", "a/weight"]


def check_an_input_that_the_product_changes_is_stored_as_it_came(folder: Path) -> None:
    bench = Bench(folder, Toy(a=Linear(InPlace())))
    for _ in range(3):
        bench.step(decode())
    assert load_file(folder / "rows-3.safetensors")["0.x.1"].abs().sum() > 0


def check_a_layer_that_is_called_twice_is_there_twice(folder: Path) -> None:
    model = Toy(a=Linear(Method()), b=Linear(Method()))
    model.called = ["a", "b", "a"]
    bench = Bench(folder, model)
    for _ in range(3):
        bench.step(decode())
    told = bench.told["model"]
    assert told["order"] == ["a", "b", "a"]
    assert len(told["layers"]) == 2
    assert len(load_file(folder / "rows-3.safetensors")) == 12


def check_weights_that_are_made_are_not_stored(folder: Path) -> None:
    bench = Bench(folder, Toy(a=Linear(Packing())), weights="made")
    for _ in range(3):
        bench.step(decode())
    told = bench.told["model"]
    assert (told["layers"][0]["tensors"], told["layers"][0]["loaded"]) == ({}, False)
    assert not list(folder.glob("weights-*"))


def refused(folder: Path, model: torch.nn.Module, **config: Any) -> Refused | None:
    """Why a model is refused."""
    try:
        Bench(folder, model, **config)
    except Refused as error:
        return error
    return None


def check_too_much_is_refused_before_anything_is_copied(folder: Path) -> None:
    error = refused(folder, Toy(a=Linear(Method(), k=1024, n=1024)))
    assert error is not None
    assert error.kind == "usage"
    assert "more than --most-gib" in str(error)
    assert not list(folder.iterdir())


def check_calls_beyond_the_estimate_end_the_capture_and_not_the_server(folder: Path) -> None:
    # Two layers are estimated with one call each; this one is called many times.
    model = Toy(a=Linear(Method()))
    model.called = ["a"] * 100
    bench = Bench(folder, model, most_bytes=1000)
    for _ in range(4):
        assert len(bench.step(decode())) == 100
    assert bench.told["fault"]["kind"] == "usage"
    assert "rows-3.safetensors would make it" in bench.told["fault"]["message"]
    assert [path.name for path in folder.glob("*rows*")] == []


def check_a_fault_of_ours_ends_the_capture_and_not_the_server(folder: Path) -> None:
    bench = Bench(folder, Toy(a=Linear(Method())))
    (folder / "armed").write_text("not a number")
    assert len(bench.step(decode())) == 1
    assert bench.told["fault"]["kind"] == "fault"
    assert "not a number" in bench.told["fault"]["message"]


def check_no_layer_of_that_name_is_refused_with_those_that_there_are(folder: Path) -> None:
    error = refused(folder, Toy(a=Linear(Method())), layers="nowhere")
    assert "matches no linear layer of the model; it has a" in str(error)


def check_shared_tensors_are_stored_once_and_files_are_bounded(folder: Path) -> None:
    import abharness_capture.capture_files as module

    module.FILE_BYTES = 100
    one, two = torch.randn(4, 5), torch.randn(4, 5)
    files = Files(folder, 10_000)
    stored = files.save_weights({"a": {"w": one}, "b": {"w": one}, "c": {"w": two, "empty": torch.empty(0)}})
    assert stored["a"] == stored["b"]
    assert stored["c"]["w"]["file"] == "weights-00002.safetensors"
    assert stored["c"]["empty"]["shape"] == [0]
    assert files.written == 160


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            place = Path(sys.argv[2]) / name
            place.mkdir()
            check(place)
            print("ok", name)
