"""vLLM's own endpoints beside the OpenAI API: `/tokenize` -> ordinary token ids, `/metrics` -> counter deltas, profiler.

Nothing here is timed. `base_url` is the server's root, for example `http://127.0.0.1:8000`.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from abharness.errors import LoadFailed, ProfilerFailed
from abharness.prompts import MIN_POOL_TOKENS, POOL_TEXT
from abharness.record import ServerCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SETTLE_S = 1.0
"""Longest wait for the counters: the server adds to them after it has sent the last token of a stream."""

SETTLE_POLL_S = 0.05
"""Between two readings of counters that may still move."""

_COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Field of `ServerCounters` -> name in `/metrics`."""


@dataclass(frozen=True, slots=True)
class TokenPool:
    """Ordinary token ids of the served model.

    Attributes:
        tokens: Distinct ids in ascending order.
        max_model_len: The server's limit on prompt and output together, tokens; None when it does not say.
    """

    tokens: list[int]
    max_model_len: int | None


def token_pool(base_url: str, served_model: str, *, timeout_s: float = 60.0) -> TokenPool:
    """Ask the server to tokenise plain English, without special tokens, and keep the distinct ids.

    Raises:
        LoadFailed: The endpoint did not answer with token ids, or with fewer than `MIN_POOL_TOKENS` distinct ones.
    """
    body = {"model": served_model, "prompt": POOL_TEXT, "add_special_tokens": False}
    try:
        answer = json.loads(_fetch(f"{base_url.rstrip('/')}/tokenize", timeout_s, body))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadFailed(f"/tokenize did not answer: {error}") from error
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise LoadFailed("/tokenize answered without a list of token ids")
    distinct = sorted(set(tokens))
    if len(distinct) < MIN_POOL_TOKENS:
        raise LoadFailed(
            f"the model's tokeniser has {len(distinct)} distinct tokens for plain English, {MIN_POOL_TOKENS} needed",
            hint="serve a model whose tokeniser has a vocabulary of English words",
        )
    limit = answer.get("max_model_len")
    return TokenPool(distinct, limit if type(limit) is int else None)


def read_counters(base_url: str, *, timeout_s: float = 10.0) -> dict[str, float] | None:
    """Read the counters of `ServerCounters` from `/metrics`, summed over engines and label sets.

    Returns:
        Value by field name, without the counters that the server does not export; None when `/metrics` cannot be
        read or holds none of them.
    """
    try:
        text = _fetch(f"{base_url.rstrip('/')}/metrics", timeout_s).decode("utf-8", "replace")
    except OSError:
        return None
    fields = {name: field for field, name in _COUNTERS.items()}
    values: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in fields:
            continue
        # Label values may hold spaces and braces; what follows the last brace is the value and maybe a timestamp.
        sample = line.rpartition("}")[2].split() if "{" in line else line.split()[1:]
        try:
            value = float(sample[0])
        except (IndexError, ValueError):
            return None
        if not math.isfinite(value):
            return None
        values[fields[name]] = values.get(fields[name], 0.0) + value
    return values or None


def server_info(base_url: str, *, timeout_s: float = 60.0) -> tuple[dict[str, Any] | None, str | None]:
    """The server's resolved configuration (`/server_info`, which vLLM has in dev mode).

    Returns:
        Its `vllm_config` and `vllm_env` as JSON data and None, or None and the reason.
    """
    try:
        answer = json.loads(_fetch(f"{base_url.rstrip('/')}/server_info?config_format=json", timeout_s))
    except (OSError, ValueError, RecursionError) as error:
        return None, f"/server_info did not answer: {error}"
    parts = {name: answer.get(name) for name in ("vllm_config", "vllm_env")} if isinstance(answer, dict) else {}
    if not isinstance(parts.get("vllm_config"), dict):
        return None, "/server_info answered without a structured vllm_config"
    return parts, None


def profile(base_url: str, what: Literal["start", "stop"], *, timeout_s: float) -> None:
    """Start or stop the server's profiler; when it has stopped, its files are written.

    Raises:
        ProfilerFailed: The server did not do it.
    """
    try:
        _fetch(f"{base_url.rstrip('/')}/{what}_profile", timeout_s, {})
    except OSError as error:
        raise ProfilerFailed(
            f"the server did not {what} its profiler: {error}",
            hint="it needs a vLLM that knows --profiler-config; see the server's log",
        ) from error


def settled_counters(
    base_url: str, reached: Callable[[Mapping[str, float]], bool] | None = None
) -> dict[str, float] | None:
    """Read the counters once they stand still, outside any timed window.

    Args:
        base_url: The server's root.
        reached: Whether a reading has what is expected of it, which ends the waiting at once.

    Returns:
        The last reading of `read_counters`, after at most about `SETTLE_S`.
    """
    deadline = time.monotonic() + SETTLE_S
    last = read_counters(base_url)
    while last is not None and not (reached is not None and reached(last)) and time.monotonic() < deadline:
        time.sleep(SETTLE_POLL_S)
        now = read_counters(base_url)
        if reached is None and now == last:
            break
        last = now
    return last


def counters_delta(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> ServerCounters | None:
    """Difference of two readings of `read_counters`.

    Returns:
        None ("not checked") when a reading is missing or a counter went backwards, which means that another server
        process answered the second time; a counter missing on either side is None in the result.
    """
    if before is None or after is None:
        return None
    deltas = {field: after[field] - before[field] for field in _COUNTERS if field in before and field in after}
    if any(delta < 0 for delta in deltas.values()):
        return None
    return ServerCounters(**deltas)


def _fetch(url: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"not an HTTP URL: {url}")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - checked above
    # The server is on loopback: a proxy of the caller's environment must not see, let alone answer, the request.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        # Closing frees the socket now; the caller only needs the status and the server's words.
        with error:
            words = error.read(300).decode("utf-8", "replace")
        raise OSError(f"HTTP {error.code}: {words}") from None
    except http.client.HTTPException as error:
        raise OSError(f"broken response: {error!r}") from error
