"""The answers of a launch -> the files that lm-eval writes for a model: samples and results, for the tools that read them.

A launch is a folder, as a model is there: `samples_<task>_<time>.jsonl` with a line a question and filter, and
`results_<time>.json`. Keys, hashes and names are those of lm-eval 0.4 (`evaluator.py`, `evaluation_tracker.py`). One
thing differs: an answer that was cut or failed has no `exact_match` in the samples (null; lm-eval calls it wrong). In
the results it counts as not right, as it does in a report. What is ours stands apart under `abharness`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from abharness.answers import FILTERS
from abharness.exported import Document, Exported, file_name, launch_name, started
from abharness.record import AnswerRecord
from abharness.runs import Launch
from abharness.spec import ExperimentSpec, Gsm8kWorkload


def documents(exported: Exported) -> Iterator[Document]:
    """Two or more files a launch; none for one that was asked no questions."""
    for launch in exported.launches():
        if not launch.answers:
            continue
        folder = exported.folder / launch_name(launch)
        time = started(launch)
        # What follows the last _ is the time, for lm-eval's readers.
        when = "unknown" if time is None else time.strftime("%Y-%m-%dT%H-%M-%S.%f")
        tasks = _tasks(launch.answers)
        for workload, answers in launch.answers.items():
            lines = [
                json.dumps(sample(exported, launch, answer, name), ensure_ascii=False, allow_nan=False) + "\n"
                for name in FILTERS
                for answer in answers
            ]
            yield Document(PurePosixPath(folder, f"samples_{tasks[workload]}_{when}.jsonl"), "".join(lines))
        data = results(exported, launch, tasks)
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        yield Document(PurePosixPath(folder, f"results_{when}.json"), text)


def _tasks(workloads: Mapping[str, object]) -> dict[str, str]:
    """A task's name for each workload, unlike the others where two have the same after the cleaning."""
    names: dict[str, str] = {}
    for workload in workloads:
        name = file_name(workload)
        names[workload] = name if name not in names.values() else f"{name}.{len(names)}"
    return names


def sample(exported: Exported, launch: Launch, answer: AnswerRecord, filter_name: str) -> dict[str, Any]:
    """A line of a samples file: one question as one filter reads its answer."""
    extraction = answer.extractions.get(filter_name)
    codes = exported.answer_codes(answer.workload)
    prompt = answer.arguments.get("gen_args_0", {}).get("arg_0", "")
    match = None if extraction is None or extraction.exact_match is None else float(extraction.exact_match)
    return {
        "doc_id": answer.doc_id,
        "doc": answer.doc,
        "target": answer.target,
        "arguments": answer.arguments,
        "resps": answer.resps,
        "filtered_resps": [(extraction.value if extraction else None) or "[invalid]"],
        "filter": filter_name,
        "metrics": ["exact_match"],
        "doc_hash": _hash(json.dumps(answer.doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(str(prompt)),
        "target_hash": _hash(answer.target),
        "exact_match": match,
        "abharness": {
            "valid": not codes,
            "codes": " ".join(codes),
            "launch": launch.record.launch_index,
            "variant": launch.record.variant,
            "state": answer.state,
            "finish_reason": answer.finish_reason or "",
        },
    }


def results(exported: Exported, launch: Launch, tasks: Mapping[str, str]) -> dict[str, Any]:
    """The aggregated file, with the keys that lm-eval's tables and viewers read."""
    spec = ExperimentSpec.model_validate(exported.run.record.spec)
    shots = {w.name: w.num_fewshot for w in spec.workloads if isinstance(w, Gsm8kWorkload)}
    by_task = {tasks[workload]: answers for workload, answers in launch.answers.items()}
    return {
        "results": {
            task: {"name": task, "alias": task, "sample_len": len(answers), **_scores(answers)}
            for task, answers in by_task.items()
        },
        "group_subtasks": {task: [] for task in by_task},
        "configs": {
            tasks[workload]: {
                "task": tasks[workload],
                "output_type": "generate_until",
                "num_fewshot": shots.get(workload),
                "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
                "filter_list": [{"name": name} for name in FILTERS],
            }
            for workload in launch.answers
        },
        "versions": {},
        "n-shot": {tasks[workload]: shots.get(workload) for workload in launch.answers},
        "higher_is_better": {task: {"exact_match": True} for task in by_task},
        "n-samples": {task: {"original": None, "effective": len(part)} for task, part in by_task.items()},
        "config": {"model": "abharness", "model_args": f"model={launch.record.model}"},
        "model_source": "abharness",
        "model_name": launch.record.model,
        "model_name_sanitized": re.sub(r'["<>:/|\\?*\[\]]+', "__", launch.record.model),
        "date": None if (when := started(launch)) is None else when.timestamp(),
        "abharness": {
            "experiment": exported.run.record.experiment,
            "run": str(exported.run.path),
            "launch": launch.record.launch_index,
            "variant": launch.record.variant,
            "codes": {tasks[workload]: exported.answer_codes(workload) for workload in launch.answers},
        },
    }


def _scores(answers: Sequence[AnswerRecord]) -> dict[str, float | str]:
    scores: dict[str, float | str] = {}
    for name in FILTERS:
        found = [extraction for one in answers if (extraction := one.extractions.get(name)) is not None]
        mean = sum(extraction.exact_match is True for extraction in found) / len(answers)
        scores[f"exact_match,{name}"] = mean
        # Of a share: the sample standard deviation over the root of the count, as lm-eval has it.
        more = len(answers) - 1
        scores[f"exact_match_stderr,{name}"] = math.sqrt(mean * (1 - mean) / more) if more else "N/A"
    return scores


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="backslashreplace")).hexdigest()
