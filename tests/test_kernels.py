"""Which kernels ran, per step and per phase; what tells two traces apart; and the command that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from abharness.cli import main
from abharness.kernels import KernelUse, StepTimes, cut, differing, labels, shorten, step_times, table, uses
from abharness.trace import Trace, read_trace
from tests.traces import (
    START_US,
    Made,
    Ran,
    decode,
    event,
    kineto,
    kineto_events,
    kineto_text,
    nsys,
    prefill,
    step,
    unannotated,
    write,
)

STEPS = [
    unannotated(Ran("warm", 1.0)),
    prefill(512, Ran("gemm", 100.0), "attention"),
    decode(1, Ran("gemm", 10.0, graph=True), Ran("gemm", 12.0, graph=True), Ran("sample", 2.0, after=True)),
    decode(1, Ran("gemm", 11.0, graph=True), Ran("sample", 3.0, after=True)),
    step((0, 0), (0, 0)),
]


def made(tmp_path: Path, steps: list[Made]) -> Trace:
    return read_trace(kineto(tmp_path / "made.json", steps))


def test_a_phase_counts_its_own_steps_only(tmp_path: Path) -> None:
    found = uses(made(tmp_path, STEPS), "decode")
    assert list(found) == ["gemm", "sample"]
    assert found["gemm"] == KernelUse(
        name="gemm",
        kind="kernel",
        calls=3,
        total_s=pytest.approx(33e-6),
        steps=2,
        per_step=1.5,
        per_step_s=pytest.approx(16.5e-6),
        graph=True,
    )
    assert not found["sample"].graph
    assert list(uses(made(tmp_path, STEPS), "prefill")) == ["gemm", "attention"]
    assert uses(made(tmp_path, STEPS), "mixed") == {}


def test_all_rows_count_but_only_those_in_steps_per_step(tmp_path: Path) -> None:
    """Three steps ran something; the empty one is no step, and what ran before the first is in none."""
    found = uses(made(tmp_path, STEPS))
    assert (found["gemm"].calls, found["gemm"].per_step, found["gemm"].steps) == (4, 4 / 3, 3)
    assert (found["warm"].calls, found["warm"].per_step, found["warm"].per_step_s, found["warm"].steps) == (
        1,
        0.0,
        0.0,
        0,
    )


def test_without_steps_nothing_is_per_step(tmp_path: Path) -> None:
    found = uses(made(tmp_path, [unannotated("gemm", "gemm")]))
    assert (found["gemm"].calls, found["gemm"].per_step, found["gemm"].per_step_s, found["gemm"].steps) == (
        2,
        None,
        None,
        None,
    )


def test_times_of_steps(tmp_path: Path) -> None:
    times = step_times(made(tmp_path, STEPS))
    assert times["decode"] == StepTimes(2, pytest.approx(1e-3, abs=2e-9), pytest.approx((24e-6 + 14e-6) / 2))
    assert times[None] == StepTimes(1, None, None)
    assert set(times) == {"prefill", "decode", None}


def test_differing_needs_every_launch_of_one_and_none_of_the_other() -> None:
    a = [{"gemm": 1, "old": 1, "odd": 1}, {"gemm": 1, "old": 1}]
    b = [{"gemm": 1, "new": 1}, {"gemm": 1, "new": 1, "rare": 1}]
    found = differing(a, b)
    assert (found.only_a, found.only_b, found.unstable) == (("old",), ("new",), ("odd", "rare"))


def test_a_kernel_that_one_launch_of_the_other_side_has_does_not_tell_them_apart() -> None:
    found = differing([{"gemm": 1}, {"gemm": 1}], [{"gemm": 1}, {}])
    assert (found.only_a, found.only_b, found.unstable) == ((), (), ("gemm",))


def test_a_side_without_launches_tells_nothing() -> None:
    assert differing([{"gemm": 1}], []).only_a == ()
    assert differing([], [{"gemm": 1}]).only_b == ()


@pytest.mark.parametrize(("name", "short"), [
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, f, 4> >(at::native::ReduceOp<float>)",
     "at::native::reduce_kernel"),
    ("void (anonymous namespace)::softmax<(int)4, {lambda(int)#1}>(float*)", "softmax"),
    ("void at::native::(anonymous namespace)::gather<long>(long)", "at::native::gather"),
    ("ncclDevKernel_AllReduce(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce"),
    ("void thrust::operator<<int>(int)", "thrust::operator<"),
    ("void f<decltype(a->b)>(int)", "f"),
    ("std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::norm<c10::BFloat16, 8>(int)",
     "vllm::norm"),
    ("void foo::operator()<int>(int)", "foo::operator()"),
    ("triton_poi_fused_mul_silu_slice_1", "triton_poi_fused_mul_silu_slice_1"),
    ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
    ("Memset (Device)", "Memset (Device)"),
    ("broken<(", "broken<("),
    ("(", "("),
    ("", ""),
])  # fmt: skip
def test_names_are_shortened_for_the_eye(name: str, short: str) -> None:
    assert shorten(name) == short


def test_labels_that_shorten_alike_stay_apart_and_are_the_same_in_every_table() -> None:
    one = "void at::native::kernel<at::native::add_functor<2> >(Params)"
    two = "void at::native::kernel<at::native::mul_functor<5, 256> >(Params)"
    both = labels([one, two, "gemm"])
    assert both["gemm"] == "gemm"
    assert both[one].startswith("at::native::kernel[add_functor]#")
    assert both[two].startswith("at::native::kernel[mul_functor]#")
    assert labels([two, one, "more"])[one] == both[one]
    numbers = labels([f"void f<{number}>(int)" for number in range(50)])
    assert len(set(numbers.values())) == 50
    long = labels(["x" * 200 + "a" + "y" * 200, "x" * 200 + "b" + "y" * 200])
    assert len(set(long.values())) == 2
    assert max(map(len, long.values())) <= 56


def test_cut_keeps_both_ends() -> None:
    assert cut("a" * 50 + "b" * 50, 20) == "aaaaaaaaaaaa...bbbbb"
    assert cut("short", 20) == "short"


def test_the_table_shows_both_sides_and_what_it_leaves_out(tmp_path: Path) -> None:
    a = uses(made(tmp_path, STEPS), "decode")
    b = uses(made(tmp_path, [decode(1, Ran("gemm", 5.0), Ran("new", 15.0))]), "decode")
    assert table(a, b, top=2) == [
        "kernel  a calls/step  a us/step  a share  b calls/step  b us/step  b share",
        "gemm            1.50       16.5    86.8%             1        5.0    25.0%  graph",
        "new                -          -        -             1       15.0    75.0%",
        "1 more             1        2.5    13.2%             0        0.0     0.0%",
        "all             2.50       19.0                      2       20.0",
    ]
    assert table({}) == ["no kernel"]


def test_a_side_without_steps_makes_the_table_one_of_whole_traces(tmp_path: Path) -> None:
    a = uses(made(tmp_path, [decode(1, "gemm"), decode(1, "gemm")]))
    b = uses(made(tmp_path, [unannotated("gemm")]))
    assert table(a, b)[0].split() == [
        "kernel",
        "a",
        "calls",
        "a",
        "us",
        "a",
        "share",
        "b",
        "calls",
        "b",
        "us",
        "b",
        "share",
    ]


def test_the_command_shows_two_files_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = kineto(tmp_path / "a.json.gz", [prefill(8, "gemm"), decode(1, "gemm", "old")])
    b = kineto(tmp_path / "b.json", [prefill(8, "gemm"), decode(1, "gemm", "new", "new")])
    assert main(["trace", str(a), str(b), "--phase", "decode"]) == 0
    out = capsys.readouterr().out
    assert f"a: {a}\n  torch profiler, 3 kernels and copies, whole\n  prefill steps: 1; medians: " in out
    assert "decode steps: 1; medians: 0.009 ms of kernels and copies in one" in out
    assert "only in a: 1\n  1 x old\nonly in b: 1\n  2 x new\n" in out
    assert "caution" not in out


def test_the_command_says_what_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = kineto_text(kineto_events([decode(1, "gemm", "old")]))
    a = write(tmp_path / "a.json", text[: text.index('"old"')])
    b = nsys(tmp_path / "b.sqlite", [decode(1, "gemm", "old")])
    assert main(["trace", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "NOT whole: it is cut off or damaged from byte" in out
    assert "caution: a not whole: what is absent may have run" in out


def test_two_profilers_may_name_a_kernel_differently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = kineto(tmp_path / "a.json", [decode(1, "x")]), nsys(tmp_path / "b.sqlite", [decode(1, "x")])
    assert main(["trace", str(a), str(b)]) == 0
    assert "only in a: none\nonly in b: none\ncaution: two profilers" in capsys.readouterr().out


def test_operators_and_kernels_are_not_held_against_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = [event("cpu_op", "aten::mm", START_US, 2.0)]
    a = write(tmp_path / "a.json", kineto_text(ops, device=None))
    b = kineto(tmp_path / "b.json", [decode(1, "gemm")])
    assert main(["trace", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "which ones only one file has is not told: one holds kernels and the other CPU operators" in out
    assert "no device activity: the rows are CPU operators" in out


def test_a_phase_that_one_file_lacks_makes_no_difference_of_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = kineto(tmp_path / "a.json", [decode(1, "gemm")]), kineto(tmp_path / "b.json", [prefill(8, "gemm")])
    assert main(["trace", str(a), str(b), "--phase", "decode"]) == 0
    assert "which ones only one file has is not told: b has nothing to compare" in capsys.readouterr().out


def test_the_command_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = kineto(tmp_path / "a.json", [decode(1, Ran("void f<1>(int)", graph=True)), step((0, 0), (0, 0))])
    assert main(["trace", str(a), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["files"]
    assert (one["source"], one["problem"], one["on_device"], one["rows"]) == ("kineto", None, True, 1)
    assert one["steps"]["decode"]["count"] == 1
    assert one["steps"]["other"] == {"count": 1, "period_s": None, "busy_s": None}
    (kernel,) = one["kernels"]
    assert (kernel["name"], kernel["calls"], kernel["per_step"], kernel["graph"]) == ("void f<1>(int)", 1, 1.0, True)
    assert main(["trace", str(a), str(kineto(tmp_path / "b.json", [decode(1, "g")])), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["only_a"], body["only_b"], body["not_compared"], body["caution"]) == (
        ["void f<1>(int)"],
        ["g"],
        None,
        None,
    )


@pytest.mark.parametrize(
    "arguments", [["none.json"], ["a", "b", "c"], ["page"], ["bare", "--phase", "decode"], ["bare", "--top", "0"]]
)
def test_what_cannot_be_shown_is_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("page"), "<html>404</html>")
    kineto(Path("bare"), [unannotated("gemm")])
    assert main(["trace", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


def test_a_wrapper_is_named_by_what_it_runs() -> None:
    attention = "flash::FlashAttnFwdSm90<flash::Mainloop<2, cute::tuple<cute::C<1> >>>"
    name = f"void cutlass::device_kernel<flash::enable_sm90_or_later<{attention}>>(flash::Params)"
    assert shorten(name) == "cutlass::device_kernel[FlashAttnFwdSm90]"
    assert shorten("void cutlass::Kernel2<gemm_64x64>(gemm_64x64::Params)") == "cutlass::Kernel2"
