"""Captures on disk, and sizes in their place: what is written, read, refused and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from abharness.cli import main
from abharness.errors import RecordError, UsageError
from abharness.replay import sizes
from abharness.replay.captures import Capture, read_capture, write_capture


def test_the_27b_hybrid_has_257_projections_in_model_order() -> None:
    capture = sizes.synthesize(sizes.BUILT_IN["hybrid-27b"], [1, 16])
    assert len(capture.order) == len(set(capture.order)) == 257
    assert capture.shapes() == {
        "16384x5120": 48,
        "5120x6144": 64,
        "34816x5120": 64,
        "5120x17408": 64,
        "14336x5120": 16,
        "248320x5120": 1,
    }
    assert [name.split(".")[1] for name in capture.order[:17:4]] == ["linear_attn"] * 3 + ["self_attn", "linear_attn"]
    assert capture.order[-1] == "64.lm_head"
    assert len({name.split(".")[0] for name in capture.order}) == 65


def test_a_capture_is_written_and_read_and_one_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    capture = sizes.synthesize(sizes.BUILT_IN["qwen3-8b"], [1])
    write_capture(tmp_path, capture)
    assert read_capture(tmp_path) == capture
    write_capture(tmp_path, capture.model_copy(update={"files": {1: "rows-1.safetensors"}}))
    with pytest.raises(RecordError, match=r"no file rows-1\.safetensors"):
        read_capture(tmp_path)
    write_capture(tmp_path, capture.model_copy(update={"order": ("nobody", *capture.order)}))
    with pytest.raises(RecordError, match="nobody is called, and is no layer of it"):
        read_capture(tmp_path)
    data = json.loads((tmp_path / "capture.json").read_text())
    for change, message in [({"schema_version": 2}, "schema version 2"), ({"layers": []}, "layers: ")]:
        (tmp_path / "capture.json").write_text(json.dumps(data | change))
        with pytest.raises(RecordError, match=message):
            read_capture(tmp_path)
    with pytest.raises(UsageError, match="holds no capture"):
        read_capture(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nblocks:\n  - layers: [{name: a, n: 0, k: 4}]", ":3: blocks[0].layers[0].n: Input should be greater"),
        ("name: x\nblocks: []", ":2: blocks: Tuple should have at least 1 item"),
        ("name: x\nblock: []", "blocks: Field required"),
        ("name: x\nname: y\nblocks: []", "name"),
        ("[]", ":1: (top level): Input should be a valid dictionary"),
    ],
)
def test_sizes_that_are_not_understood_are_told_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        sizes.read_sizes(str(path))
    assert message in str(error.value)
    with pytest.raises(UsageError, match=r"no built-in name \(hybrid-27b, qwen3-8b\)"):
        sizes.read_sizes("nothing")


def test_synthesize_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "27b"
    assert main(["replay", "synthesize", "hybrid-27b", "-o", str(folder), "--rows", "1", "--rows", "16"]) == 0
    made = capsys.readouterr().out
    assert "hybrid-27b: 257 linear layers of a step, rows 1, 16" in made
    assert main(["replay", "show", str(folder)]) == 0
    assert capsys.readouterr().out == made
    assert isinstance(read_capture(folder), Capture)
    assert main(["replay", "synthesize", "qwen3-8b", "-o", str(folder)]) == 2
    assert "27b: not empty" in capsys.readouterr().err
    assert main(["replay", "show", str(tmp_path)]) == 2
    assert "holds neither capture.json nor replay.json" in capsys.readouterr().err
