"""The benchmark and the tuning without a GPU: they say that they need one, and know what a step multiplies by."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEVICE

from pq2 import bench, launches, tune


@pytest.mark.parametrize("module", ["bench", "tune"])
@pytest.mark.skipif(DEVICE == "cuda", reason="there is a CUDA device")
def test_nothing_is_measured_on_a_cpu(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"pq2.{module}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA device: nothing is measured on a CPU" in done.stderr


def _documented(module) -> list[list[str]]:
    name = module.__name__
    lines = [
        line.split(f"python -m {name}", 1)[1] for line in module.__doc__.splitlines() if line.startswith("    python")
    ]
    return [re.split(r"\s{2,}", line)[0].split() for line in lines]


def test_every_documented_command_is_one() -> None:
    parsed = [vars(bench.parser().parse_args(command)) for command in _documented(bench)]
    assert parsed[0] == {
        "shape": "hybrid-27b", "rows": list(bench.ROWS), "json": None, "plot": None,
        "peers": ["all"],
    }  # fmt: skip
    assert parsed[1]["shape"] == "qwen3-8b"
    assert parsed[2]["rows"] == [1, 16, 2048]
    assert (parsed[3]["json"], parsed[3]["plot"]) == (Path("FILE"), Path("FILE"))
    assert parsed[4]["peers"] == ["humming-w2a8"]
    parsed = [vars(tune.parser().parse_args(command)) for command in _documented(tune)]
    assert parsed[0]["out"] == Path("kernels/pq2/tables/sm_90.json")
    assert (parsed[1]["weights"], parsed[1]["rows"]) == ([(5120, 17408)], [8, 16])


def test_a_step_has_every_product_as_often_as_the_model_and_mixes_them() -> None:
    step = [one for one in bench.projections("hybrid-27b") if one.converted]
    order = bench.in_turn(step)
    assert len(order) == 257
    assert {number: order.count(number) for number in set(order)} == dict(enumerate(one.count for one in step))
    most = max(len(list(run)) for run in re.findall(r"((\d)\2*)", "".join(map(str, order))) for run in run[:1])
    assert most <= 2  # never many alike one after the other


FOUND = {
    "gpu": "a GPU", "copy_tb_s": 1.0, "floor_ms": 0.208, "counts": {"16384x5120": 48, "5120x6144": 2},
    "rows": [
        {"impl": "pq2", "n": 16384, "k": 5120, "m": 1, "us": 10.0, "tb_s": 0.4, "rel_err": 2e-3},
        {"impl": "cublas-bf16", "n": 16384, "k": 5120, "m": 1, "us": 20.0, "tb_s": 8.4, "rel_err": 2e-3},
    ],
    "step_ms": {"pq2": {"1": 0.5}, "cublas-bf16": {"1": 1.0}}, "prefill_tflops": {}, "launch_us": {"pq2": {"1": 20.0}},
    "small": [],
}  # fmt: skip


def test_results_are_told_beside_their_floor() -> None:
    lines = bench.table_lines(FOUND)
    assert lines[0] == "a GPU, copy 1.00 TB/s; a step's weights at that rate: 0.21 ms"
    assert "| step, ms | M=1 |" in lines
    assert "| pq2 | 0.500 |" in lines
    assert "| CPU of a call, us | M=1 |" in lines
    assert "| 16384x5120 | 48 | 4.00 | 10.00 | 20.00 |" in lines
    assert not any("prefill" in line for line in lines)


def test_what_was_not_measured_is_told_and_has_no_number() -> None:
    peer = {"impl": "a-peer", "n": 16384, "k": 5120, "m": 16, "us": 12.0, "tb_s": 0.4, "rel_err": 2e-3}
    ours = FOUND["rows"][0] | {"m": 16}
    lines = bench.table_lines(
        FOUND
        | {"rows": [*FOUND["rows"], ours, peer], "peers_left_out": {"a-peer 16384x5120 M=1": "RuntimeError: no"}}
        | {"step_ms": {"pq2": {"1": 0.5, "16": 0.6}, "a-peer": {"16": 0.7}}}
    )
    assert "| a-peer | - | 0.700 |" in lines
    assert "| 16384x5120 | 48 | 4.00 | 10.00 | 20.00 | - |" in lines
    assert "| 16384x5120 | 48 | 4.00 | 10.00 | - | 12.00 |" in lines
    assert lines[-1] == "a-peer 16384x5120 M=1 is left out: RuntimeError: no"


def test_a_table_is_read_as_it_was_written() -> None:
    for arch in ("sm_86", "sm_90"):
        name, table = launches.table(arch)
        assert name == arch
        text = tune.write(table)
        assert launches.read_table(text) == table
        assert json.loads(text)["tuned"].keys() >= {"1", "8", "16", "32", "64", "any"}


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize(
    ("m", "k"), [(1, 5120), (1, 640), (8, 6144), (16, 17408), (32, 5120), (64, 640), (512, 17408), (2048, 6144)]
)
def test_candidates_are_entries_that_take_the_shape(m: int, k: int, arch: str) -> None:
    found = tune.candidates(arch, m, 5120, k, tune._default(launches.table(arch)[1]["tuned"], m), 132)
    assert any(entry.path == "prefill_wgmma" for entry in found) == (arch == "sm_90" and m > 16 and k % 256 == 0)
    assert len(found) == len(set(found)) > (0 if k % 1024 or m > 16 else 5)
    for entry in found:
        assert k % entry.kind.k_multiple == 0
        assert entry.kind.rows[0] <= m <= entry.kind.rows[1]
        assert launches.read_entry(launches.write_entry(entry)) == entry


def test_a_step_tries_the_fastest_and_those_that_leave_room() -> None:
    rings = [launches.Entry("single_ring", launches.SingleRing(8, 16, 2, 1, stages, 4)) for stages in range(12, 1, -1)]
    found = tune.alternatives(rings, 5120)
    assert found[:6] == rings[:6]
    light = [entry for entry in rings if tune.held(entry, 5120) <= tune.SHARED // 2]
    assert set(found[6:]) == set(light[:3]) - set(rings[:6])
    assert light


def test_a_step_is_tuned_a_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [launches.Entry("single", launches.Single(4, 8, warps)) for warps in (1, 2, 4)]
    # The first weight's entry of 2 warps is worth it only once the second weight has 4.
    seconds = {(1, 1): 5.0, (2, 1): 6.0, (4, 1): 7.0, (1, 2): 5.5, (2, 2): 6.5, (1, 4): 4.0, (2, 4): 3.0, (4, 4): 3.5}

    class Step:
        def by(self, chosen: list[launches.Entry]) -> tuple[int, ...]:
            return tuple(entry.launch.num_warps for entry in chosen)

    def graph_times(calls: dict, replays: int, least: int) -> dict[str, list[float]]:
        return {name: [seconds[call]] for name, (call, _) in calls.items()}

    monkeypatch.setattr(tune.timing, "graph_times", graph_times)
    found, before, after = tune.in_step(Step(), [entries[0], entries[0]], [entries, entries])
    assert [entry.launch.num_warps for entry in found] == [2, 4]
    assert (before, after) == (5.0, 3.0)


@pytest.mark.parametrize("text", ["5120", "5120x", "x128", "0x128", "64x100", "-1x128", "64x128x2"])
def test_a_weight_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.parser().parse_args([f"--weights={text}"])
    assert "a weight is NxK, such as 5120x6144, K a multiple of 128" in capsys.readouterr().err


def test_rows_that_tables_do_not_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.parser().parse_args(["--rows", "16", "any"]).rows == [16, launches.ANY]
    with pytest.raises(SystemExit):
        tune.parser().parse_args(["--rows", "24"])
    assert "'24': tables have entries for 1, 8, 16, 32, 64, 128, 256, 512, any rows" in capsys.readouterr().err


def test_prefill_is_tuned_without_heads() -> None:
    assert (248320, 5120) in tune._weights(16)
    assert (248320, 5120) not in tune._weights(32)
    assert set(tune._weights(32)) < set(tune._weights(16))
