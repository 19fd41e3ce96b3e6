"""What is looked at around one measured window, never inside it: counters, log, compile caches, samples of the GPUs."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from abharness import endpoints
from abharness.compilation import Watch
from abharness.hostload import HostWatch
from abharness.metrics import steady_window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from abharness.record import RequestRecord, ServerCounters
    from abharness.sampler import Sampler


class CounterWatch:
    """The server's counters from one moment to a later one.

    What was sent before must have been counted when it begins: traffic that is not measured is watched too, for the
    waiting that `ended` does.
    """

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._before = endpoints.settled_counters(base_url)

    def ended(self, prompt_tokens: int, generation_tokens: int) -> ServerCounters | None:
        """What was counted since, once it is what the client counted, or has had time to be."""
        before = self._before

        def reached(now: Mapping[str, float]) -> bool:
            expected = {"prompt_tokens": prompt_tokens, "generation_tokens": generation_tokens}
            return before is not None and all(
                now.get(name, 0.0) - before.get(name, 0.0) >= tokens for name, tokens in expected.items()
            )

        return endpoints.counters_delta(before, endpoints.settled_counters(self._base_url, reached))


class WindowWatch:
    """Everything that is seen around a measured window; begins when it is made."""

    def __init__(
        self,
        base_url: str,
        log_path: Path,
        cache_dirs: Mapping[str, Path],
        sampler: Sampler,
        tree: Callable[[], Sequence[int]],
    ) -> None:
        """Begin.

        Args:
            base_url: The server's root.
            log_path: Its log.
            cache_dirs: Its compile caches, by variable.
            sampler: Samples its GPUs.
            tree: Ids of its processes.
        """
        self._sampler = sampler
        self._counters = CounterWatch(base_url)
        self._compilation = Watch(log_path, cache_dirs)
        # The load generator collects garbage before its window, and that holds up the sampler when the window begins.
        # Collected and set aside now, there is nothing left for it to go through.
        gc.collect()
        gc.freeze()
        self._host = HostWatch(tree)
        sampler.look_now()

    def ended(
        self, started_s: float, ended_s: float, requests: Sequence[RequestRecord], max_concurrency: int
    ) -> dict[str, Any]:
        """The fields of the cell's record that tell what was seen.

        Args:
            started_s: Start of the window, monotonic seconds.
            ended_s: Its end.
            requests: All requests of the cell.
            max_concurrency: Requests that were to be kept in flight.
        """
        self._sampler.look_now()
        host = self._host.ended()
        compilation = self._compilation.ended()
        gpus = self._sampler.windows(started_s, ended_s)
        steady = steady_window(requests, max_concurrency)
        return {
            "compilation": compilation,
            "host": host,
            "gpus": gpus,
            "gpus_steady": self._sampler.windows(steady.start_s, steady.end_s) if steady else None,
            "gpus_absent": self._sampler.absent if gpus is None else None,
            "counters": self._counters.ended(
                prompt_tokens=sum(request.prompt_tokens or 0 for request in requests),
                generation_tokens=sum(request.output_tokens or 0 for request in requests),
            ),
        }
