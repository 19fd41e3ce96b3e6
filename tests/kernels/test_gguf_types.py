"""GGUF tensor type 142 in the gguf package's own tables."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pq2 import gguf_types
from pq2.errors import FormatError
from pq2.format import pack, ternarize


def test_the_type_is_there_by_number_and_name_and_once() -> None:
    before = gguf_types.register()
    assert gguf_types.register() is before
    assert gguf.GGMLQuantizationType(142) is before
    assert gguf.GGMLQuantizationType["PQ2_0"] is before
    assert [kind for kind in gguf.GGMLQuantizationType if kind == 142] == [before]
    assert gguf.GGML_QUANT_SIZES[before] == (128, 34)


def test_a_file_holds_blocks_and_the_package_dequantises_them(tmp_path: Path) -> None:
    kind = gguf_types.register()
    weight = torch.randn(6, 384, generator=torch.Generator().manual_seed(0))
    codes, scales = ternarize(weight)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a", pack(codes, scales).numpy(), raw_dtype=kind)
    writer.add_tensor("b", np.ones(7, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    assert (first.tensor_type, first.shape.tolist(), first.n_bytes) == (kind, [384, 6], 6 * 3 * 34)
    assert np.array_equal(first.data, pack(codes, scales).numpy())
    assert np.array_equal(second.data, np.ones(7, np.float32))
    values = (codes.float() - 1) * scales.float().repeat_interleave(128, dim=1)
    assert np.array_equal(gguf.dequantize(first.data, kind), values.numpy())
    assert np.array_equal(gguf.quantize(weight.numpy(), kind), first.data)


def test_another_type_under_the_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, gguf_types.register(), (256, 66))
    with pytest.raises(FormatError, match="type 142 as PQ2_0, 256 weights in 66 bytes; PQ2 is 128 in 34"):
        gguf_types.register()
