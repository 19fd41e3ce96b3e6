"""What is looked at around a measured window: late compiling, the server's totals, preemptions; and its warm-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from abharness.compilation import CACHES, KEPT, Watch
from abharness.plan import Shape, shapes
from abharness.record import ServerCounters
from abharness.spec import CACHE_VARIABLES, DecodeWorkload, PrefillWorkload
from abharness.warmup import LAST_TOKENS, OUTPUT_LEN, waves
from abharness.windows import Compilation
from tests.synthetic import Made, write_run
from tests.test_run import CANDIDATE, launches, run, run_dir

JIT_LINE = "Triton kernel JIT compilation during inference: _zero_kv_blocks_kernel. This causes a latency spike"
LATE = {"when": CANDIDATE, "requests": [2]}  # the second measured request of the only cell, without warm-up
ONE_CELL = ("--only", "decode", "--set", "workloads.decode.max_concurrency=1")

# Each row: faults of the fake server, the codes of the comparison, what its report must say.
LIES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a kernel is compiled, by the log": ({"jit": {**LATE, "line": JIT_LINE}}, ["jit_in_window"], "_zero_kv_blocks"),
    "a kernel is compiled, by its file alone": (
        {"jit": {**LATE, "file": "TRITON_CACHE_DIR/QX/late.cubin"}}, ["jit_in_window"], "TRITON_CACHE_DIR/QX/late.cubin"
    ),
    "a graph is compiled, by its file alone": (
        {"jit": {**LATE, "file": "VLLM_CACHE_ROOT/torch_compile_cache/5f/late.py"}}, ["jit_in_window"], "5f/late.py"
    ),
    "other traffic": ({"count_extra": {**LATE, "prompt_tokens": 7}}, ["prompt_tokens_mismatch"], "counted 71 prompt"),
    "tokens that nobody asked for": (
        {"count_extra": {**LATE, "generation_tokens": 3}}, ["output_tokens_mismatch"], "counted 67 output tokens"
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_a_window_ends_in_its_code(lie: str, tmp_path: Path, capsys: Any) -> None:
    faults, codes, text = LIES[lie]
    code = run(tmp_path, *ONE_CELL, "--set", "workloads.decode.num_warmups=0", **faults)
    out = capsys.readouterr()
    assert code == 3, out.out + out.err
    found = json.loads((run_dir(tmp_path) / "comparison.json").read_text())["comparisons"][0]
    # A busy machine may slow the client down as well.
    assert [code for code in found["codes"] if code != "client_bound"] == codes
    assert set(codes) <= set(found["cells"][0]["codes"])
    assert text in out.out


def test_what_is_compiled_during_the_warm_up_is_well_and_counters_may_come_late(tmp_path: Path, capsys: Any) -> None:
    late = {"jit": {"requests": [1], "line": JIT_LINE, "file": "TRITON_CACHE_DIR/QX/early.cubin"}}
    assert run(tmp_path, *ONE_CELL, counters_late_s=0.3, **late) == 0, capsys.readouterr().out
    for record in launches(tmp_path):
        (cell,) = record.cells
        assert cell.compilation == Compilation()
        assert (cell.gpus, bool(cell.gpus_absent)) == (None, True)
        assert cell.counters is not None
        assert (cell.counters.prompt_tokens, cell.counters.generation_tokens) == (64, 64)


def test_preemptions_are_told_by_variant(tmp_path: Path, capsys: Any) -> None:
    faults = {"count_extra": {**LATE, "num_preemptions": 2}}
    assert run(tmp_path, *ONE_CELL, "--set", "workloads.decode.num_warmups=0", **faults) == 0
    out = capsys.readouterr().out
    assert "baseline 0, candidate 2 time(s)" in out
    assert "KV cache" in out


def test_preemptions_that_were_not_counted_are_unknown_not_none(tmp_path: Path, capsys: Any) -> None:
    twice = ServerCounters(prompt_tokens=64, generation_tokens=44, preemptions=2)
    launches = {"baseline": [Made(counters=None)] * 4, "candidate": [Made(counters=twice)] * 4}
    write_run(tmp_path / "r", launches)  # type: ignore[arg-type]
    main(["compare", str(tmp_path / "r")])
    assert "baseline unknown, candidate 8 time(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({"no_metrics": True}, "/metrics could not be read"),
        ({"counters_missing": ["num_preemptions"]}, "preemptions (not exported by /metrics)"),
        ({"counters_missing": ["generation_tokens"]}, "generation_tokens (not exported by /metrics)"),
    ],
)
def test_counters_that_cannot_be_read_are_said_not_to_be_checked(
    faults: dict[str, Any], text: str, tmp_path: Path, capsys: Any
) -> None:
    assert run(tmp_path, *ONE_CELL, **faults) == 0
    assert f"not checked: {text}" in capsys.readouterr().out.replace("the server's counters (", "")


def test_the_totals_over_the_questions_are_compared_too(tmp_path: Path, capsys: Any) -> None:
    faults = {"count_extra": {"when": CANDIDATE, "requests": [3], "prompt_tokens": 40}}
    assert run(tmp_path, "--only", "gsm8k", **faults) == 3
    out = capsys.readouterr().out
    assert "prompt_tokens_mismatch: launch 1-candidate, gsm8k" in out
    assert "6 questions" in out
    for record in launches(tmp_path):
        assert record.accuracy[0].counters is not None


def test_failed_questions_leave_the_totals_unchecked_and_are_told_themselves(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, "--only", "gsm8k", http_errors={"when": CANDIDATE, "requests": [3], "status": 500}) == 3
    found = json.loads((run_dir(tmp_path) / "comparison.json").read_text())["comparisons"][0]
    assert found["codes"] == ["incomplete_requests"]


@pytest.mark.parametrize(
    ("made", "codes", "advice"),
    [
        (Made(), [], []),
        (Made(counters=None), [], ["not_checked"]),
        (Made(counters=ServerCounters(prompt_tokens=64, generation_tokens=44)), [], ["not_checked"]),
        (Made(counters=ServerCounters(prompt_tokens=65, generation_tokens=43)),
         ["prompt_tokens_mismatch", "output_tokens_mismatch"], ["not_checked"]),
        (Made(compilation=None), [], ["not_checked"]),
        (Made(compilation=Compilation(not_checked=["the server's log: gone"])), [], ["not_checked"]),
        (Made(compilation=Compilation(lines=["x"], lines_total=1)), ["jit_in_window"], []),
        (Made(compilation=Compilation(files=["x"], files_total=1)), ["jit_in_window"], []),
        (Made(answer_counters=None), [], ["not_checked"]),
        (Made(answer_counters=ServerCounters(prompt_tokens=1, generation_tokens=1)),
         ["prompt_tokens_mismatch", "output_tokens_mismatch"], []),
    ],
)  # fmt: skip
def test_what_is_on_record_is_judged_and_what_is_not_is_never_zero(
    made: Made, codes: list[str], advice: list[str], tmp_path: Path, capsys: Any
) -> None:
    write_run(tmp_path / "r", {"baseline": [Made()] * 4, "candidate": [made] * 4})
    main(["compare", str(tmp_path / "r"), "--format", "json"])
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert found["codes"] == codes
    assert sorted({item["finding"]["code"] for item in found["advice"]} - {"effect_unproven"}) == advice


# Lines as the projects print them, and lines of the same servers that tell of no compiling.
COMPILING = [
    f"(EngineCore pid=7972) WARNING 05-16 11:10:19 [jit_monitor.py:103] {JIT_LINE}",
    "(EngineCore pid=7) WARNING 06-19 16:22:25 [jit_monitor.py:124] CuTeDSL JIT compilation during inference: Fwd",
    "(EngineCore pid=187) INFO 04-19 10:11:35 [backends.py:398] Compiling a graph for compile range (1, 32768) takes 4 s",
    "(EngineCore pid=187) INFO 04-19 [backends.py:377] Cache the graph of compile range (1, 32768) for later use",
    "INFO backends.py:1153 Dynamo bytecode transform time: 3.55 s",
    "INFO monitor.py:53 torch.compile took 11.57 s in total",
    "Capturing CUDA graphs (decode, FULL):  12%|#         | 6/51 [00:00<00:03]",
    "Triton autotuning for function kernel finished after 0.12s; best config selected: BLOCK_M: 128;",
    "2025-11-27 09:46:31,105 - INFO - autotuner.py:256 - flashinfer.jit: [Autotuner]: Autotuning process starts ...",
    "[AutoTuner]: Tuning fp4_gemm:   0%|          | 0/13 [00:00<?, ?profile/s]",
    "2025-02-27 12:24:22,992 - INFO - flashinfer.jit: Loading JIT ops: batch_decode",
    "[1/4] /usr/local/cuda/bin/nvcc -O3 -c kernel.cu -o kernel.o",
    "V0101 00:00:00.000000 1 torch/_dynamo/guards.py:5389] [0/1] [__recompiles] Recompiling function forward in m.py:3",
    "W0903 18:41:46 torch/_dynamo/convert_frame.py:1358] [0/8] torch._dynamo hit config.recompile_limit (8)",
    "AUTOTUNE addmm(16x64, 16x64, 64x64)",
]
ELSE = [
    "(APIServer pid=1) INFO:     127.0.0.1:54426 - \"POST /v1/completions HTTP/1.1\" 200 OK",
    "(APIServer pid=1) INFO 11-29 [loggers.py:257] Engine 000: Avg prompt throughput: 6.4 tokens/s, Running: 1 reqs",
    "(EngineCore pid=2) INFO 11-29 [jit_monitor.py:71] Kernel JIT monitor activated; monitored JIT compilations during "
    "inference will use mode=warn.",
    "(EngineCore pid=2) INFO 11-29 [backends.py:292] Directly load the compiled graph(s) for compile range (1, 2048)",
]  # fmt: skip


def test_log_lines_that_tell_of_compiling_are_known_from_others(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("\n".join(COMPILING) + "\n")
    watch = Watch(log, {})
    with log.open("a") as out:
        out.write("\n".join([*ELSE, *COMPILING]) + "\n")
    seen = watch.ended()
    assert (seen.lines, seen.lines_total) == (COMPILING, len(COMPILING)), "those before the window are not its own"


def test_only_code_that_appears_in_a_cache_counts_and_what_is_kept_is_bounded(tmp_path: Path) -> None:
    assert CACHES.keys() <= CACHE_VARIABLES.keys()
    dirs = {name: tmp_path / name for name in CACHES}
    for path in dirs.values():
        path.mkdir()
    triton = dirs["TRITON_CACHE_DIR"]
    (triton / "old.cubin").write_text("1")
    watch = Watch(tmp_path / "server.log", dirs)
    (triton / "old.cubin").write_text("2")
    for name in ("k.lock", "tmp.pid_7_x", "k.json.tmp"):
        (triton / name).write_text("")
    (dirs["FLASHINFER_WORKSPACE_BASE"] / "flashinfer_jit.log").write_text("")
    (dirs["VLLM_CACHE_ROOT"] / "modelinfos").mkdir()
    (dirs["VLLM_CACHE_ROOT"] / "modelinfos/m.json").write_text("")
    first = watch.ended()
    assert (first.files_total, first.lines_total) == (0, 0)
    assert first.not_checked, "a log that is not there was not looked at"
    for number in range(KEPT + 5):
        (triton / f"{number:02}.cubin").write_text("")
    seen = watch.ended()
    assert (len(seen.files), seen.files_total) == (KEPT, KEPT + 5)
    assert seen.files[0] == "TRITON_CACHE_DIR/00.cubin"


def decode(concurrency: int, **values: Any) -> Shape:
    fields = {"input_len": 512, "output_len": 1024, "max_concurrency": (concurrency,), **values}
    return shapes(DecodeWorkload(kind="decode", name="d", **fields))[0]


@pytest.mark.parametrize("concurrency", [1, 2, 16, 64, 200])
def test_the_warm_up_reaches_every_batch_size_and_the_end_of_the_context(concurrency: int) -> None:
    batches, contexts = waves(decode(concurrency))
    assert batches.input_len == 512
    assert len(set(batches.output_lens)) == concurrency, "each ends in a step of its own"
    assert list(batches.output_lens) == sorted(batches.output_lens)
    assert min(batches.output_lens) > concurrency * 512 / 2048, "the first ends when the last has begun"
    assert contexts.input_len + LAST_TOKENS == 512 + 1024
    assert contexts.output_lens == (LAST_TOKENS,) * concurrency
    assert max(batches.output_lens) <= max(OUTPUT_LEN, concurrency + concurrency * 512 // 2048 + 2)


def test_no_warm_up_request_is_longer_than_the_cell() -> None:
    for shape in (decode(4, output_len=2), decode(100, output_len=70), decode(1, input_len=4, output_len=65)):
        for wave in waves(shape):
            assert all(wave.input_len + length <= shape.input_len + shape.output_len for length in wave.output_lens)


def test_more_warm_ups_are_sent_first_and_fewer_are_raised_to_the_concurrency_but_none_is_none() -> None:
    assert [len(wave.output_lens) for wave in waves(decode(4, num_warmups=10))] == [10, 4]
    assert [len(wave.output_lens) for wave in waves(decode(4, num_warmups=1))] == [4, 4]
    assert waves(decode(4, num_warmups=0)) == []
    prefill = shapes(PrefillWorkload(kind="prefill", name="p", input_lens=(128,), max_concurrency=3))[0]
    assert [(wave.input_len, wave.output_lens) for wave in waves(prefill)] == [(128, (1, 1, 1))]


def test_warm_up_waves_are_sent_to_both_variants_alike(tmp_path: Path) -> None:
    """The order of prompts of a launch goes on over both waves: the measured ones are equal, and never warmed up."""
    arguments = ("--only", "decode", "--set", "workloads.decode.output_len=80")
    assert run(tmp_path, *arguments, "--set", "workloads.decode.max_concurrency=2") == 0
    first, second = launches(tmp_path)
    assert first.cells[0].prompts_sha256 == second.cells[0].prompts_sha256
    assert first.cells[0].counters is not None
    assert first.cells[0].counters.prefix_cache_hits == 0
