"""A launch's workloads -> cells and answers: warm-up, timed load and questions against its ready server.

What is measured is on disk as soon as it is known; the cells and accuracy runs go into the launch's record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from abharness import accuracy, endpoints, loadgen, prompts, warmup
from abharness.ask import Reply, ask
from abharness.beside import Beside
from abharness.checks import check_cell
from abharness.claims import HeldLaunch
from abharness.errors import LoadFailed
from abharness.observe import CounterWatch, WindowWatch
from abharness.plan import PlannedLaunch, Shape, shapes
from abharness.progress import Reporter
from abharness.record import AccuracyRun, AnswerRecord, CellRecord, RequestLine, RequestRecord, Variant
from abharness.runs import ANSWERS_FILE, REQUESTS_FILE
from abharness.sampler import Sampler
from abharness.spec import ExperimentSpec, Gsm8kWorkload
from abharness.storage import append_lines
from abharness.telemetry import Gpu


@dataclass(frozen=True, slots=True)
class Questions:
    """A gsm8k workload made ready before anything is launched."""

    asked: Sequence[accuracy.Question]
    prompts: Sequence[accuracy.Prompt]
    sha256: str


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the launches of one run share.

    Attributes:
        questions: Questions of each gsm8k workload.
        versions: What each variant's interpreter reports of itself.
        hold: Told what the launch of the moment holds of the machine; None when it has given everything back.
    """

    spec: ExperimentSpec
    config_hash: str
    gpu: Gpu
    reporter: Reporter
    questions: Mapping[str, Questions]
    versions: Mapping[Variant, Mapping[str, str]]
    hold: Callable[[HeldLaunch | None], None]


class Load:
    """The load of one launch.

    Attributes:
        cells: What was measured so far.
        accuracy: The questions that were asked so far.
    """

    def __init__(
        self,
        run: RunContext,
        planned: PlannedLaunch,
        folder: Path,
        *,
        sampler: Sampler,
        tree: Callable[[], Sequence[int]],
        alive: Callable[[], str | None],
        enter: Callable[[str], None],
    ) -> None:
        """Prepare the load; nothing is sent yet.

        Args:
            run: What the launches of the run share.
            planned: The launch.
            folder: Its folder.
            sampler: Samples its GPUs.
            tree: Ids of the server's processes.
            alive: Why the load cannot go on, or None; returns at once.
            enter: Told the name of each phase that begins.
        """
        self.run = run
        self.spec = run.spec
        self.planned = planned
        self.folder = folder
        self.cells: list[CellRecord] = []
        self.accuracy: list[AccuracyRun] = []
        self._sampler = sampler
        self._tree = tree
        self._alive = alive
        self._enter = enter
        self._ordinal = 0
        self._token_pool: Sequence[int] = ()

    @property
    def base_url(self) -> str:
        """The server's root."""
        return f"http://127.0.0.1:{self.planned.port}"

    def measure(self) -> None:
        """Run every workload, in the order of the spec.

        Raises:
            LoadFailed: The server died, answers something else, or cannot take the work.
        """
        if self.spec.workloads:
            pool = endpoints.token_pool(self.base_url, self.planned.served_model_name)
            self._token_pool = pool.tokens
            self._check_lengths(pool.max_model_len)
        for workload in self.spec.workloads:
            if isinstance(workload, Gsm8kWorkload):
                self._answer(workload)
            else:
                for shape in shapes(workload):
                    self._cell(shape)

    def _check_lengths(self, max_model_len: int | None) -> None:
        """The server's own limit, where the spec did not set one: refused before load, not failed in the middle."""
        for workload in self.spec.workloads:
            if max_model_len is None or isinstance(workload, Gsm8kWorkload):
                continue
            need = max(shape.input_len + shape.output_len for shape in shapes(workload))
            if need > max_model_len:
                raise LoadFailed(
                    f"{workload.name} needs {need} tokens a request, the server takes {max_model_len}",
                    hint="lower the lengths or raise --max-model-len",
                )

    def next_prompts(self, shape: Shape, count: int, label: str, input_len: int) -> list[list[int]]:
        """Prompts that were never sent before, the same in every launch; token ids.

        Args:
            shape: The cell they are for.
            count: How many.
            label: What part of it they are for.
            input_len: Tokens of each.
        """
        built = prompts.build_prompts(
            self._token_pool,
            seed=self.spec.design.seed,
            label=f"{shape.label} {label}",
            num_prompts=count,
            input_len=input_len,
            first_ordinal=self._ordinal,
        )
        self._ordinal += count
        return built

    def drive(self, shape: Shape, sent: list[list[int]], output_len: int | Sequence[int]) -> loadgen.CellTraffic:
        """Send prompts at a shape's concurrency and wait for the ends of their streams.

        Raises:
            CellFailed: The server died; it has what was received.
            CellInterrupted: Asked to stop; the same.
        """
        with Beside(self.run.reporter.advance) as told:
            return loadgen.run_cell(
                base_url=self.base_url,
                served_model=self.planned.served_model_name,
                prompts=sent,
                output_len=output_len,
                max_concurrency=shape.max_concurrency,
                request_timeout_s=self.spec.server.request_timeout_s,
                alive=self._alive,
                on_progress=told.put,
            )

    def _warm_up(self, shape: Shape) -> None:
        for wave in warmup.waves(shape):
            self._enter(f"{shape.label} warm-up")
            sent = self.next_prompts(shape, len(wave.output_lens), f"warm-up {wave.name}", wave.input_len)
            counters = CounterWatch(self.base_url)
            traffic = self.drive(shape, sent, wave.output_lens)
            failed = [request.error for request in traffic.requests if request.error]
            if failed:
                raise LoadFailed(f"{len(failed)} of {len(sent)} warm-up requests failed: {failed[0]}")
            # Tokens of the warm-up that the server counts late must not be counted in the window.
            counters.ended(
                prompt_tokens=sum(map(len, sent)),
                generation_tokens=sum(wave.output_lens),
            )

    def _cell(self, shape: Shape) -> None:
        self._warm_up(shape)
        for repeat in range(shape.repeats):
            self._enter(shape.label if shape.repeats == 1 else f"{shape.label} repeat {repeat + 1}/{shape.repeats}")
            sent = self.next_prompts(shape, shape.num_prompts, f"repeat {repeat}", shape.input_len)
            watch = WindowWatch(
                self.base_url, self.planned.log_path, self.planned.cache_dirs, self._sampler, self._tree
            )
            try:
                traffic = self.drive(shape, sent, shape.output_len)
            except (loadgen.CellFailed, loadgen.CellInterrupted) as cut:
                self._keep(shape, repeat, cut.traffic.requests)
                raise
            self._keep(shape, repeat, traffic.requests)
            seen = watch.ended(traffic.started_s, traffic.ended_s, traffic.requests, shape.max_concurrency)
            cell = CellRecord(
                workload=shape.workload,
                kind=shape.kind,
                input_len=shape.input_len,
                output_len=shape.output_len,
                max_concurrency=shape.max_concurrency,
                repeat=repeat,
                started_s=traffic.started_s,
                ended_s=traffic.ended_s,
                prompts_sha256=prompts.prompts_hash(sent),
                client=traffic.client,
                **seen,
            )
            self.cells.append(cell)
            for finding in check_cell(cell, traffic.requests):
                self.run.reporter.warn(f"{shape.label}: {finding.message}", finding.code)

    def _keep(self, shape: Shape, repeat: int, requests: Sequence[RequestRecord]) -> None:
        lines = [
            RequestLine(
                workload=shape.workload,
                input_len=shape.input_len,
                output_len=shape.output_len,
                max_concurrency=shape.max_concurrency,
                repeat=repeat,
                request=request,
            )
            for request in requests
        ]
        append_lines(self.folder / REQUESTS_FILE, lines)

    def _answer(self, workload: Gsm8kWorkload) -> None:
        self._enter(f"{workload.name} {workload.num_questions} questions")
        ready = self.run.questions[workload.name]
        counters = CounterWatch(self.base_url)
        started_s = time.monotonic()
        records: list[AnswerRecord] = []

        def write(record: AnswerRecord, done: int) -> None:
            append_lines(self.folder / ANSWERS_FILE, [record])
            self.run.reporter.advance(done, workload.num_questions)

        with Beside(write) as writer:

            def on_answer(index: int, reply: Reply) -> None:
                records.append(self._answer_record(workload, ready, index, reply))
                writer.put(records[-1], len(records))

            ask(
                base_url=self.base_url,
                served_model=self.planned.served_model_name,
                prompts=[prompt.messages or prompt.text or "" for prompt in ready.prompts],
                max_tokens=workload.max_tokens,
                max_concurrency=workload.max_concurrency,
                logprobs=workload.logprobs,
                stop=ready.prompts[0].stop,
                seed=self.spec.design.seed,
                request_timeout_s=self.spec.server.request_timeout_s,
                alive=self._alive,
                on_answer=on_answer,
            )
        ended_s = time.monotonic()
        self.accuracy.append(
            AccuracyRun(
                workload=workload.name,
                num_questions=workload.num_questions,
                doc_ids=[question.doc_id for question in ready.asked],
                answered=len(records),
                max_concurrency=workload.max_concurrency,
                max_tokens=workload.max_tokens,
                questions_sha256=ready.sha256,
                started_s=started_s,
                ended_s=ended_s,
                counters=counters.ended(
                    prompt_tokens=sum(record.prompt_tokens or 0 for record in records),
                    generation_tokens=sum(record.output_tokens or 0 for record in records),
                ),
            )
        )
        states = accuracy.summarise(records).states
        self.run.reporter.note(f"{workload.name}: {', '.join(f'{count} {state}' for state, count in states.items())}")

    def _answer_record(self, workload: Gsm8kWorkload, ready: Questions, index: int, reply: Reply) -> AnswerRecord:
        return accuracy.answer_record(
            workload.name,
            ready.asked[index],
            ready.prompts[index],
            reply.text,
            finish_reason=reply.finish_reason,
            generation={"max_tokens": workload.max_tokens, "temperature": 0, "seed": self.spec.design.seed},
            reasoning=reply.reasoning,
            tokens=reply.tokens,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            e2el_s=reply.e2el_s,
            error=reply.error,
            decided_by=workload.filter,
        )
