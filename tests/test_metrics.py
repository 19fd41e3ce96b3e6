"""Metrics of a cell from its request records, on hand-computed cases."""

import pytest

from abharness.metrics import (
    ENERGY_METRICS,
    METRICS,
    Window,
    cell_metrics,
    energy_basis,
    energy_unknown,
    percentile,
    steady_window,
    tokens_within,
)
from abharness.record import CellRecord, ClientLoad, RequestRecord
from tests.synthetic import gpu


def request(
    index: int, sent: float, first: float, last: float, tokens: int = 11, error: str | None = None
) -> RequestRecord:
    return RequestRecord(
        index=index,
        prompt_sha256="x",
        requested_input_len=100,
        requested_output_len=tokens,
        submitted_s=sent,
        sent_s=sent,
        first_token_s=first,
        last_token_s=last,
        prompt_tokens=100,
        output_tokens=tokens,
        chunks=tokens,
        error=error,
    )


def cell(started: float, ended: float, concurrency: int = 1, kind: str = "decode") -> CellRecord:
    return CellRecord(
        workload="w",
        kind=kind,  # type: ignore[arg-type]
        input_len=100,
        output_len=11,
        max_concurrency=concurrency,
        repeat=0,
        started_s=started,
        ended_s=ended,
        prompts_sha256="x",
        client=ClientLoad(cpu_share=0.1, loop_lag_p50_s=0, loop_lag_p99_s=0, chunks_per_s=1),
        counters=None,
    )


def test_rates_and_latencies_of_two_requests_in_a_row() -> None:
    found = cell_metrics(cell(0, 4), [request(0, 0, 1, 2), request(1, 2, 2.5, 4)])
    assert found["output_throughput"] == pytest.approx(22 / 4)
    assert found["total_token_throughput"] == pytest.approx(222 / 4)
    assert found["request_throughput"] == pytest.approx(0.5)
    assert found["ttft"] == pytest.approx(0.75)
    assert found["tpot"] == pytest.approx((0.1 + 0.15) / 2)
    assert found["e2el"] == pytest.approx(2)


def test_failed_requests_are_in_no_latency_and_no_rate() -> None:
    good = [request(0, 0, 1, 2)]
    with_failure = cell_metrics(cell(0, 2), [*good, request(1, 0, 0.001, 0.002, error="500")])
    assert with_failure["ttft"] == cell_metrics(cell(0, 2), good)["ttft"]
    assert with_failure["output_throughput"] == pytest.approx(11 / 2)


def test_h2_nothing_completed_is_none_not_zero_and_not_nan() -> None:
    found = cell_metrics(cell(0, 0), [request(0, 0, 1, 2, error="500")])
    assert found
    assert set(found.values()) == {None}


def test_prefill_throughput_counts_prompt_tokens() -> None:
    found = cell_metrics(cell(0, 2, kind="prefill"), [request(0, 0, 1, 1, tokens=1), request(1, 1, 2, 2, tokens=1)])
    assert found["prefill_throughput"] == pytest.approx(100)
    assert "tpot" not in found


def test_steady_window_is_from_full_concurrency_to_the_first_slot_that_stays_empty() -> None:
    # Two slots, four requests: 0 and 1 start at 0.0 and 0.5; 2 and 3 follow; the first slot to stay empty is at 3.0.
    done = [request(0, 0, 0.2, 1), request(1, 0.5, 0.7, 2), request(2, 1, 1.2, 3), request(3, 2, 2.2, 4)]
    assert steady_window(done, 2) == Window(0.5, 3)


def test_no_steady_window_where_the_concurrency_was_never_reached_or_a_request_failed() -> None:
    done = [request(0, 0, 0.2, 1), request(1, 1, 1.2, 2)]
    assert steady_window(done, 4) is None
    assert steady_window([*done, request(2, 1, 1, 1, error="x")], 1) is None


def test_tokens_within_a_window() -> None:
    one = request(0, 0, 1, 2, tokens=11)  # first token at 1.0, ten more evenly up to 2.0
    assert tokens_within(one, Window(0, 3)) == pytest.approx(11)
    assert tokens_within(one, Window(1.5, 3)) == pytest.approx(5)
    assert tokens_within(one, Window(5, 6)) == 0


def test_steady_throughput_leaves_ramp_and_tail_out() -> None:
    # One slot keeps 10 tok/s; the whole window has a long idle tail.
    done = [request(0, 0, 0, 1), request(1, 1, 1, 2), request(2, 2, 2, 3)]
    found = cell_metrics(cell(0, 6), done)
    assert found["output_throughput"] == pytest.approx(33 / 6)
    assert found["output_throughput_steady"] == pytest.approx(11, abs=0.5)


def test_percentile_matches_linear_interpolation() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == pytest.approx(2.5)
    assert percentile([5], 0.99) == 5
    assert percentile([], 0.5) is None


def test_each_kind_has_exactly_one_headline_metric() -> None:
    for kind in ("decode", "prefill"):
        assert len([metric for metric in METRICS if kind in metric.kinds and metric.headline]) == 1


def on_gpus(made: CellRecord, *gpus: object, steady: object = None) -> CellRecord:
    return made.model_copy(update={"gpus": list(gpus), "gpus_steady": steady})


PREFILL = [request(0, 0, 1, 1, tokens=1), request(1, 1, 2, 2, tokens=1)]


def test_energy_of_a_prefill_is_shared_by_its_prompt_tokens() -> None:
    made = on_gpus(cell(0, 2, kind="prefill"), gpu(energy_j=600, idle_power_w=100))
    found = cell_metrics(made, PREFILL)
    assert found["energy_per_prompt_token"] == pytest.approx(600 / 200)
    assert found["net_energy_per_prompt_token"] == pytest.approx((600 - 200) / 200)
    assert "energy_per_output_token" not in found
    assert energy_unknown(made, PREFILL) == {}


def test_the_steady_energy_is_shared_by_the_tokens_of_the_steady_window() -> None:
    done = [request(0, 0, 0, 1), request(1, 0.5, 0.5, 2), request(2, 1, 1, 3), request(3, 2, 2, 4)]
    window = steady_window(done, 2)
    assert window is not None
    made = on_gpus(
        cell(0, 5, concurrency=2), gpu(energy_j=500), steady=[gpu(energy_j=100), gpu(uuid="GPU-2", energy_j=900)]
    )
    tokens = sum(tokens_within(one, window) for one in done)
    assert tokens < 44
    assert cell_metrics(made, done)["energy_per_output_token_steady"] == pytest.approx(100 / tokens)


def test_without_a_gpu_there_is_no_energy_metric_and_no_reason() -> None:
    made = cell(0, 2, kind="prefill")
    assert not set(cell_metrics(made, PREFILL)) & set(ENERGY_METRICS)
    assert (energy_unknown(made, PREFILL), energy_basis(made)) == ({}, None)


def test_an_unknown_energy_is_none_with_its_reason_and_never_nothing() -> None:
    old = on_gpus(cell(0, 2, kind="prefill"), gpu(energy_j=None, energy_source=None, power_kind=None))
    assert cell_metrics(old, PREFILL)["energy_per_prompt_token"] is None
    assert energy_unknown(old, PREFILL) == dict.fromkeys(
        ("energy_per_prompt_token", "net_energy_per_prompt_token"), "energy: not on record"
    )
    idle = on_gpus(cell(0, 2, kind="prefill"), gpu(memory_used_bytes_max=0))
    assert "no sampled GPU does the work" in energy_unknown(idle, PREFILL)["energy_per_prompt_token"]
    failed = on_gpus(cell(0, 2, kind="prefill"), gpu())
    assert "no tokens" in energy_unknown(failed, [request(0, 0, 1, 1, error="x")])["energy_per_prompt_token"]
