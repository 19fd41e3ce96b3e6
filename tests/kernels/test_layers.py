"""The plugin's layers in vLLM's own classes: what is loaded, cut, tied and refused; on interpreted kernels too."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, poisoned
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from pq2 import dispatch, launches, ops, quantize, reference, small_gemm, switches
from pq2 import format as pq2_format
from pq2.errors import FormatError, PathUnavailable
from pq2.layers import Pq2Config, Pq2EmbeddingMethod, Pq2LinearMethod, SmallLinearMethod

SETS = ("reference", "tuned")


@pytest.fixture(params=SETS)
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> switches.Choice:
    """The operators registered, and the switches as if the process had been started with them."""
    chosen = switches.resolve({"PQ2_KERNELS": request.param}, "cuda")
    ops.register(chosen)
    monkeypatch.setattr(ops, "_choice", chosen)
    monkeypatch.setattr(Pq2Config, "choice", chosen, raising=False)
    return chosen


class Model:
    """Makes layers as vLLM does, of one rank of so many, and loads weights into them by their loaders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Pq2Config, load_format: str = "auto") -> None:
        self.config = config
        self.vllm = VllmConfig(load_config=LoadConfig(load_format=load_format))
        self.monkeypatch = monkeypatch
        self.rank(0, 1)

    def rank(self, rank: int, size: int) -> None:
        import vllm.model_executor.layers.vocab_parallel_embedding as vllm_embedding
        import vllm.model_executor.parameter as vllm_parameter

        for module in (vllm_linear, vllm_embedding, vllm_parameter):
            self.monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank, raising=False)
            self.monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size, raising=False)

    def layer(self, kind: type, *args, prefix: str = "model.layers.0.mlp.proj", **kwargs) -> torch.nn.Module:
        with set_current_vllm_config(self.vllm), torch.device(DEVICE), self.monkeypatch.context() as patched:
            poisoned(patched)  # what no loader fills is no number, not whatever the memory held
            return kind(*args, quant_config=self.config, prefix=prefix, params_dtype=torch.float32, **kwargs)

    def finish(self, layer: torch.nn.Module) -> None:
        layer.quant_method.process_weights_after_loading(layer)


@pytest.fixture
def model(choice: switches.Choice, monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(monkeypatch, Pq2Config(None, []))


def _blocks(n: int, k: int, seed: int) -> torch.Tensor:
    return pq2_format.to_blocks(pq2_format.random(n, k, DEVICE, seed))


def _load(layer: torch.nn.Module, blocks: torch.Tensor, *shard: object) -> None:
    layer.weight.weight_loader(layer.weight, blocks, *shard)


def _wanted(x: torch.Tensor, *blocks: torch.Tensor) -> torch.Tensor:
    return reference.matmul(x, pq2_format.prepare(torch.cat(blocks)))


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.shape == wanted.shape and float((got.double() - wanted).norm() / wanted.norm()) < 2e-6


@pytest.mark.parametrize("m", [1, 3])
def test_a_replicated_layer_multiplies(model: Model, choice: switches.Choice, m: int) -> None:
    layer = model.layer(ReplicatedLinear, 384, 70, bias=False)
    assert type(layer.quant_method) is Pq2LinearMethod
    blocks = _blocks(70, 384, 1)
    _load(layer, blocks)
    model.finish(layer)
    x = torch.randn(m, 384, device=DEVICE)
    before = dict(dispatch.CALLS)
    got, _ = layer(x)
    assert _close(got, _wanted(x, blocks))
    path = "reference" if choice.kernel_set == "reference" else "single" if m == 1 else "legacy"
    assert dispatch.CALLS[path] == before[path] + 1


def test_what_requests_will_run_is_compiled_when_weights_are_loaded(
    model: Model, choice: switches.Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_warm", set())
    rows = []
    run = dispatch.matmul
    monkeypatch.setattr(dispatch, "matmul", lambda x, *rest: rows.append(x.shape[0]) or run(x, *rest))
    before = dict(dispatch.CALLS)
    for n in (32, 48):  # alike for a compiler
        layer = model.layer(ReplicatedLinear, 128, n, bias=False)
        _load(layer, _blocks(n, 128, 1))
        model.finish(layer)
    table = launches.table("sm_90")[1]["exact" if choice.kernel_set == "exact" else "tuned"]
    more = {rows + 1 for rows in table if rows != launches.ANY}
    assert rows == ([] if choice.kernel_set == "reference" else sorted({*dispatch.WARM_ROWS, *more}))
    assert before == dispatch.CALLS  # none of them were products of the model
    tiles = {dispatch.legacy_tile(m) for m in range(2, 4097)}
    assert tiles == {dispatch.legacy_tile(m) for m in dispatch.WARM_ROWS if m > 1}


def test_a_compiled_model_is_one_graph_for_any_number_of_tokens(choice: switches.Choice, monkeypatch) -> None:
    model = Model(monkeypatch, Pq2Config(256, []))
    embedding = model.layer(VocabParallelEmbedding, 64, 256, prefix="model.embed_tokens")
    layer = model.layer(ReplicatedLinear, 256, 64, bias=True)
    layer.bias.data.fill_(1.0)
    for seed, part in enumerate((embedding, layer)):
        _load(part, _blocks(64, 256, seed))
        part.signs.weight_loader(part.signs, torch.ones(256, dtype=torch.int8))
        model.finish(part)
    graphs = []

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return layer.quant_method.apply(layer, embedding.quant_method.embedding(embedding, ids), layer.bias)

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for tokens in (5, 2, 17, 64):
        ids = torch.arange(tokens, device=DEVICE)
        torch._dynamo.mark_dynamic(ids, 0)
        assert torch.equal(compiled(ids), forward(ids))
    assert len(graphs) == 1


def test_leading_dimensions_and_a_bias_are_kept(model: Model) -> None:
    layer = model.layer(ReplicatedLinear, 128, 5, bias=True)
    blocks = _blocks(5, 128, 1)
    _load(layer, blocks)
    layer.bias.data.copy_(torch.arange(5.0))
    model.finish(layer)
    x = torch.randn(2, 3, 128, device=DEVICE)
    got, _ = layer(x)
    wanted = _wanted(x.reshape(6, 128), blocks) + torch.arange(5.0, device=DEVICE)
    assert _close(got, wanted.reshape(2, 3, 5))


def test_tensor_parallel_ranks_cut_rows_and_columns(model: Model) -> None:
    up, down = _blocks(64, 256, 1), _blocks(48, 512, 2)
    gate = _blocks(64, 256, 3)
    q, k, v = _blocks(128, 256, 4), _blocks(64, 256, 5), _blocks(64, 256, 6)
    x, wide = torch.randn(2, 256, device=DEVICE), torch.randn(2, 512, device=DEVICE)
    columns, merged, qkv, rows = [], [], [], torch.zeros(2, 48, device=DEVICE)
    for rank in (0, 1):
        model.rank(rank, 2)
        one = model.layer(ColumnParallelLinear, 256, 64, bias=False)
        _load(one, up)
        two = model.layer(MergedColumnParallelLinear, 256, [64, 64], bias=False)
        _load(two, gate, 0)
        _load(two, up, 1)
        three = model.layer(QKVParallelLinear, 256, 32, 4, 2, bias=False)
        for name, part in (("q", q), ("k", k), ("v", v)):
            _load(three, part, name)
        four = model.layer(RowParallelLinear, 512, 48, bias=False, reduce_results=False)
        _load(four, down)
        for layer in (one, two, three, four):
            model.finish(layer)
        columns.append(one(x)[0])
        merged.append(two(x)[0].split([32, 32], dim=-1))
        qkv.append(three(x)[0].split([64, 32, 32], dim=-1))
        rows += four(wide[:, 256 * rank : 256 * (rank + 1)])[0]
    assert _close(torch.cat(columns, dim=-1), _wanted(x, up))
    assert _close(torch.cat([part[0] for part in merged], dim=-1), _wanted(x, gate))
    assert _close(torch.cat([part[1] for part in merged], dim=-1), _wanted(x, up))
    for place, blocks in enumerate((q, k, v)):
        assert _close(torch.cat([part[place] for part in qkv], dim=-1), _wanted(x, blocks))
    # The scales of activations are per group, and a rank has whole groups: the sum is the product of one rank.
    assert _close(rows, _wanted(wide, down))


def test_more_ranks_than_key_heads_share_them(model: Model) -> None:
    q, k, v = _blocks(128, 256, 4), _blocks(64, 256, 5), _blocks(64, 256, 6)
    x = torch.randn(2, 256, device=DEVICE)
    for rank in range(4):
        model.rank(rank, 4)
        layer = model.layer(QKVParallelLinear, 256, 32, 4, 2, bias=False)
        for name, part in (("q", q), ("k", k), ("v", v)):
            _load(layer, part, name)
        model.finish(layer)
        head = slice(32 * (rank // 2), 32 * (rank // 2) + 32)
        mine = q[32 * rank : 32 * (rank + 1)], k[head], v[head]
        assert _close(layer(x)[0], _wanted(x, *mine))


def test_several_parts_of_a_merged_layer_in_one_tensor_are_cut_each(model: Model) -> None:
    """As Gated DeltaNet's queries, keys and values come: one matrix, then z."""
    sizes = [64, 64, 128, 128]
    blocks, z = _blocks(256, 256, 1), _blocks(128, 256, 2)
    x = torch.randn(2, 256, device=DEVICE)
    for rank in (0, 1):
        model.rank(rank, 2)
        layer = model.layer(MergedColumnParallelLinear, 256, sizes, bias=False)
        _load(layer, blocks, (0, 1, 2))
        _load(layer, z, 3)
        model.finish(layer)
        mine = [part.chunk(2)[rank] for part in (*blocks.split(sizes[:3]), z)]
        assert _close(layer(x)[0], _wanted(x, *mine))


def test_ranks_cut_a_padded_vocabulary(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.model_executor.layers.vocab_parallel_embedding as vllm_embedding

    monkeypatch.setattr(vllm_embedding, "tensor_model_parallel_all_reduce", lambda rows: rows)
    table = _blocks(70, 128, 7)  # padded to 128: the second rank has 6 rows of it
    ids = torch.tensor([0, 63, 64, 69], device=DEVICE)
    x = torch.randn(2, 128, device=DEVICE)
    rows, logits = torch.zeros(4, 128, device=DEVICE), []
    for rank in (0, 1):
        model.rank(rank, 2)
        embedding = model.layer(VocabParallelEmbedding, 70, 128, prefix="model.embed_tokens")
        head = model.layer(ParallelLMHead, 70, 128, prefix="lm_head")
        for layer in (embedding, head):
            _load(layer, table)
            model.finish(layer)
        rows += embedding(ids)
        logits.append(head.quant_method.apply(head, x))
    prepared = pq2_format.prepare(table)
    assert torch.equal(rows, reference.embedding(ids, prepared, torch.float32))
    whole = torch.cat(logits, dim=-1)
    assert _close(whole[:, :70], reference.matmul(x, prepared))
    assert not whole[:, 70:].any()


def test_an_embedding_is_looked_up_and_a_tied_head_shares_its_bytes(model: Model) -> None:
    table = _blocks(259, 128, 7)
    embedding = model.layer(VocabParallelEmbedding, 259, 128, prefix="model.embed_tokens")
    head = model.layer(ParallelLMHead, 259, 128, prefix="lm_head")
    assert type(embedding.quant_method) is type(head.quant_method) is Pq2EmbeddingMethod
    head = head.tie_weights(embedding)
    _load(embedding, table)
    model.finish(embedding)
    model.finish(head)
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    ids = torch.tensor([[0, 258], [5, 17]], device=DEVICE)
    prepared = pq2_format.prepare(table)
    wanted = reference.embedding(ids.flatten(), prepared, torch.float32).reshape(2, 2, 128)
    assert torch.equal(embedding(ids), wanted)
    x = torch.randn(2, 128, device=DEVICE)
    logits = head.quant_method.apply(head, x)
    assert _close(logits[:, :259], reference.matmul(x, prepared))
    assert not logits[:, 259:].any()  # vLLM pads the vocabulary


def test_a_rotated_model_rotates_by_the_signs_of_its_modules(choice: switches.Choice, monkeypatch) -> None:
    model = Model(monkeypatch, Pq2Config(256, []))
    signs = (torch.randint(0, 2, (512,)) * 2 - 1).to(torch.int8)
    blocks = _blocks(64, 512, 3), _blocks(64, 512, 4)
    layer = model.layer(MergedColumnParallelLinear, 512, [64, 64], bias=False)
    for shard, part in enumerate(blocks):
        _load(layer, part, shard)
        layer.signs.weight_loader(layer.signs, signs, shard)
    with pytest.raises(FormatError, match=r"fuses here .* different signs"):
        layer.signs.weight_loader(layer.signs, -signs, 1)
    model.finish(layer)
    x = torch.randn(2, 512, device=DEVICE)
    wanted = _wanted(quantize.rotate(x, signs.to(DEVICE), 256), *blocks)
    got, _ = layer(x)
    assert float((got.double() - wanted).norm() / wanted.norm()) < 2e-3


def test_the_signs_of_a_row_parallel_layer_are_cut_with_it(choice: switches.Choice, monkeypatch) -> None:
    model = Model(monkeypatch, Pq2Config(256, []))
    signs = (torch.randint(0, 2, (512,)) * 2 - 1).to(torch.int8)
    for rank in (0, 1):
        model.rank(rank, 2)
        layer = model.layer(RowParallelLinear, 512, 48, bias=False, reduce_results=False)
        layer.signs.weight_loader(layer.signs, signs)
        assert torch.equal(layer.signs.data.cpu(), signs[256 * rank : 256 * (rank + 1)])


def test_a_rotation_that_ranks_would_cut_is_refused(choice: switches.Choice, monkeypatch) -> None:
    model = Model(monkeypatch, Pq2Config(1024, []))
    model.rank(0, 2)
    message = r"mlp\.proj: 2 tensor-parallel ranks would cut the rotation: K is 3072 in 3 blocks of 1024.*: 1, 3"
    with pytest.raises(FormatError, match=message):
        model.layer(RowParallelLinear, 3072, 64, bias=False)


def test_ranks_that_would_cut_a_group_are_refused(model: Model) -> None:
    model.rank(0, 4)
    with pytest.raises(FormatError, match=r"K is 384, and 4 tensor-parallel ranks would cut it within a group of 128"):
        model.layer(RowParallelLinear, 384, 64, bias=False)


def test_what_the_checkpoint_lacks_is_told(model: Model) -> None:
    layer = model.layer(MergedColumnParallelLinear, 128, [64, 64], bias=False)
    _load(layer, _blocks(64, 128, 1), 0)
    with pytest.raises(
        FormatError, match=r"mlp\.proj\.weight: 64 of 128 rows, from row 64 on, are not in the checkpoint"
    ):
        model.finish(layer)


def test_missing_signs_are_told(choice: switches.Choice, monkeypatch) -> None:
    model = Model(monkeypatch, Pq2Config(256, []))
    layer = model.layer(ReplicatedLinear, 256, 64, bias=False)
    _load(layer, _blocks(64, 256, 1))
    with pytest.raises(FormatError, match=r"the model is rotated, and this module has no signs \(.*proj\.signs\)"):
        model.finish(layer)


def test_a_damaged_weight_is_told(model: Model) -> None:
    blocks = _blocks(8, 256, 1)
    blocks[3, 34:36] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # fp16 infinity
    layer = model.layer(ReplicatedLinear, 256, 8, bias=False)
    _load(layer, blocks)
    with pytest.raises(FormatError, match=r"proj\.weight: the scale of row 3, group 1 is inf"):
        model.finish(layer)


def test_weights_are_not_loaded_over_those_of_a_running_model(model: Model) -> None:
    layer = model.layer(ReplicatedLinear, 128, 8, bias=False)
    _load(layer, _blocks(8, 128, 1))
    model.finish(layer)
    with pytest.raises(FormatError, match="cannot be loaded over those of a running model"):
        _load(layer, _blocks(8, 128, 2))


@pytest.mark.parametrize("rotation", [None, 256])
def test_vllms_own_reload_is_refused(choice: switches.Choice, monkeypatch, rotation: int | None) -> None:
    """It puts new tensors into the layer, and back what it does not load: the reference's dense copy would stay."""
    from vllm.model_executor.model_loader import reload

    model = Model(monkeypatch, Pq2Config(rotation, []))
    layer = model.layer(ReplicatedLinear, 256, 8, bias=False)
    signs = torch.ones(256, dtype=torch.int8)
    reload.record_metadata_for_reloading(layer)
    _load(layer, _blocks(8, 256, 1))
    if rotation:
        layer.signs.weight_loader(layer.signs, signs)
    model.finish(layer)
    reload.initialize_layerwise_reload(layer)
    part, content = (layer.signs, signs) if rotation else (layer.weight, _blocks(8, 256, 2))
    with pytest.raises(FormatError, match="cannot be loaded over those of a running model"):
        part.weight_loader(part, content)


def test_dummy_weights_are_ternary_and_differ_between_layers(choice: switches.Choice, monkeypatch) -> None:
    model = Model(monkeypatch, Pq2Config(None, []), "dummy")
    layers = [model.layer(ReplicatedLinear, 256, 64, bias=False, prefix=f"model.layers.{i}.proj") for i in (0, 1)]
    for layer in layers:
        model.finish(layer)
    first, second = (pq2_format.view(layer.weight.data.view(-1), 64, 256) for layer in layers)
    pq2_format.check_blocks(pq2_format.to_blocks(first))
    assert not torch.equal(first.codes, second.codes)


def test_what_is_not_converted_is_unquantised_and_small_projections_are_split(
    choice: switches.Choice, monkeypatch
) -> None:
    names = ["model.layers.0.in_proj_b", "model.layers.0.in_proj_a", "lm_head"]
    config = Pq2Config(None, names)
    config.packed_modules_mapping = {"in_proj_ba": ["in_proj_b", "in_proj_a"]}
    model = Model(monkeypatch, config)
    layer = model.layer(MergedColumnParallelLinear, 640, [48, 48], bias=False, prefix="model.layers.0.in_proj_ba")
    head = model.layer(ParallelLMHead, 64, 128, prefix="lm_head")
    assert type(head.quant_method) is UnquantizedEmbeddingMethod
    if choice.kernel_set == "reference":
        assert type(layer.quant_method) is UnquantizedLinearMethod
        return
    assert type(layer.quant_method) is SmallLinearMethod
    layer.weight.data.copy_(torch.randn(96, 640))
    weight = layer.weight.data.clone()
    # On a CPU vLLM packs weights its own way after loading, and drops them; the kernel is for GPUs.
    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", lambda self, layer: None)
    model.finish(layer)
    before = dict(dispatch.CALLS)
    for m in (1, 16, 17):
        x = torch.randn(m, 640, device=DEVICE)
        assert _close(layer(x)[0], reference.small_gemm(x, weight))
    assert dispatch.CALLS["small_gemm"] == before["small_gemm"] + 2
    assert dispatch.CALLS["dense"] == before["dense"] + 1


@pytest.mark.parametrize("bias", [True, False])
def test_a_small_projection_is_compiled_when_weights_are_loaded(
    choice: switches.Choice, monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    if choice.kernel_set == "reference":
        pytest.skip("the reference has no kernels")
    model = Model(monkeypatch, Pq2Config(None, ["model.gate"]))
    layer = model.layer(ReplicatedLinear, 640, 48, bias=bias, prefix="model.gate")
    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", lambda self, layer: None)
    launched = []
    run = small_gemm.small_gemm
    monkeypatch.setattr(small_gemm, "small_gemm", lambda *given: launched.append(given) or run(*given))
    before = dict(dispatch.CALLS)
    model.finish(layer)
    [(x, weight, arrived, added)] = launched
    assert weight is layer.weight
    assert added is layer.bias  # with a bias it is another kernel
    assert x.dtype == weight.dtype
    assert not arrived.any()
    assert before == dispatch.CALLS


def test_only_some_of_a_fused_module_converted_is_refused(choice: switches.Choice, monkeypatch) -> None:
    config = Pq2Config(None, ["model.in_proj_b"])
    config.packed_modules_mapping = {"in_proj_ba": ["in_proj_b", "in_proj_a"]}
    with pytest.raises(ValueError, match="some but not all shards"):
        Model(monkeypatch, config).layer(LinearBase, 128, 64, prefix="model.in_proj_ba")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"group_size": 64}, "group_size 64: pq2 has 128"),
        ({"rotation_block": 1000}, "rotation_block 1000: a power of two, or null"),
        ({"rotation_block": True}, "rotation_block True: a power of two, or null"),
        ({"bits": 2}, "bits: unknown; pq2 has quant_method, group_size"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head': a list of names"),
        ({"modules_to_not_convert": [["lm_head"]]}, "modules_to_not_convert .*: a list of names"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(config: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Pq2Config.from_config({"quant_method": "pq2", **config})


def test_batch_invariance_is_not_promised(choice: switches.Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    if choice.kernel_set == "reference":
        Pq2Config.from_config({"quant_method": "pq2"})
        return
    with pytest.raises(PathUnavailable, match=r"VLLM_BATCH_INVARIANT=1: .* one row .* PQ2_KERNELS=reference"):
        Pq2Config.from_config({"quant_method": "pq2"})


def test_an_ordinary_model_is_not_served_as_pq2(tmp_path: Path) -> None:
    """`--quantization pq2` for a model directory whose config.json says nothing of it."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    register_quantization_config("pq2")(Pq2Config)
    model = SimpleNamespace(
        model=str(tmp_path), revision=None, quantization="pq2", quantization_config=None,
        hf_config=SimpleNamespace(), hf_overrides={},
    )  # fmt: skip
    with pytest.raises(FormatError, match=r"--quantization pq2: config\.json has no quantization_config.*pq2\.convert"):
        get_quant_config(model, LoadConfig())


@pytest.mark.parametrize("name", ["lm_head", "model.language_model.layers.0.mlp.down_proj"])
def test_names_of_a_checkpoint_are_mapped_as_its_tensors_are(choice: switches.Choice, monkeypatch, name: str) -> None:
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.model_executor.models.utils import WeightsMapper

    class Multimodal(torch.nn.Module):
        hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_prefix={"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
        )

    config = Pq2Config(None, [name])
    configure_quant_config(config, Multimodal)
    own = "language_model." + name.replace("language_model.", "")
    model = Model(monkeypatch, config)
    kind = ParallelLMHead if name == "lm_head" else ReplicatedLinear
    kept, other = (model.layer(kind, 256, 256, prefix=prefix).quant_method for prefix in (own, f"other.{own}"))
    assert isinstance(kept, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
    assert isinstance(other, Pq2EmbeddingMethod | Pq2LinearMethod)
