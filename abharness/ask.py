"""Prompts -> answers, not timed for speed: GSM8K questions and readiness probes through the OpenAI client.

A question is asked once: the client's own retries are off, because a retried answer hides a failing server. What comes
back is read as plain JSON, since vLLM's fields (`reasoning`) are not the SDK's.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from abharness.errors import LoadFailed
from abharness.record import CLOSE_NATS, TokenStep
from abharness.workers import ServerGone, closed_loop

ChatOrText = str | Sequence[Mapping[str, str]]
"""A completion prompt, or the messages of a chat."""

_MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        text: The answer itself, without reasoning; empty when the server sent null or no content.
        reasoning: The thinking text, apart; None when there was none.
        finish_reason: As sent by the server.
        prompt_tokens: `usage.prompt_tokens`, or None when not sent.
        output_tokens: `usage.completion_tokens`, or None when not sent.
        tokens: Each generated token with its best alternative; None when log-probabilities were not asked or not sent.
        error: Why there is no answer, else None.
        e2el_s: From submission to the whole answer, seconds.
    """

    text: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens: list[TokenStep] | None = None
    error: str | None = None
    e2el_s: float | None = None


def ask(
    *,
    base_url: str,
    served_model: str,
    prompts: Sequence[ChatOrText],
    max_tokens: int,
    max_concurrency: int,
    request_timeout_s: float,
    alive: Callable[[], str | None],
    on_answer: Callable[[int, Reply], None],
    logprobs: int | None = None,
    seed: int | None = None,
    stop: Sequence[str] | None = None,
) -> list[Reply]:
    """Ask every question once, greedily, in a fixed order of submission.

    Args:
        base_url: The server's root, for example `http://127.0.0.1:8000`.
        served_model: The `--served-model-name`.
        prompts: A text goes to `/v1/completions`, messages go to `/v1/chat/completions`.
        max_tokens: Limit on the answer, reasoning included.
        max_concurrency: Questions in flight.
        request_timeout_s: Longest wait for one answer.
        alive: None while the server runs, else why it does not; called twice a second, must return at once.
        on_answer: Called with the question's position and its reply as each arrives, so that it can be stored.
        logprobs: Alternatives to ask for at each token, or None.
        seed: Sampling seed to send, or None.
        stop: Stop sequences.

    Returns:
        Replies in the order of the questions; one that failed has `error` set.

    Raises:
        LoadFailed: `alive` gave a reason. What arrived until then went through `on_answer`.
    """
    replies: dict[int, Reply] = {}

    async def drive() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{base_url.rstrip('/')}/v1",
            api_key="none",
            max_retries=0,
            timeout=request_timeout_s,
            # The server is on loopback: a proxy of the caller's environment has no business in between.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:

            async def work(index: int) -> bool:
                reply = await _ask_one(client, served_model, prompts[index], max_tokens, logprobs, seed, stop)
                replies[index] = reply
                on_answer(index, reply)
                return reply.error is None

            await closed_loop(len(prompts), max_concurrency, work, alive)

    try:
        asyncio.run(drive())
    except ServerGone as gone:
        raise LoadFailed(
            f"the server went away after {len(replies)} of {len(prompts)} answers: {gone}",
            hint="the end of the server's log says why",
        ) from None
    return [replies[index] for index in range(len(prompts))]


def list_models(base_url: str, *, timeout_s: float = 10.0) -> list[str]:
    """Names under which the server at `base_url` serves.

    Raises:
        LoadFailed: It did not answer `/v1/models` as an OpenAI server does.
    """
    try:
        with _client(base_url, timeout_s) as client:
            payload = json.loads(client.models.with_raw_response.list().http_response.content)
        return [str(model["id"]) for model in payload["data"]]
    except (openai.OpenAIError, ValueError, TypeError, KeyError) as error:
        raise LoadFailed(f"/v1/models did not answer: {_describe(error)}") from error


def first_completion(base_url: str, served_model: str, timeout_s: float) -> str | None:
    """Try one real completion: the only sign of life that a dead or foreign engine cannot give.

    Args:
        base_url: The server's root.
        served_model: The name our server was started with.
        timeout_s: Longest wait for each of two answers, the list of models and the completion.

    Returns:
        None when our model answered with a token, else the reason why it did not.
    """
    try:
        names = list_models(base_url, timeout_s=timeout_s)
        if served_model not in names:
            return f"the server there serves {', '.join(names) or 'nothing'}, not {served_model}"
        with _client(base_url, timeout_s) as client:
            response = client.completions.with_raw_response.create(
                model=served_model, prompt="One", max_tokens=1, temperature=0
            )
        payload = json.loads(response.http_response.content)
        reply = _reply(payload, chat=False)
    except (openai.OpenAIError, ValueError) as error:
        return _describe(error)
    except LoadFailed as error:
        return str(error)
    if reply.error is not None:
        return reply.error
    if not reply.output_tokens:
        return "the completion came back without a token"
    signed = _mapping(payload).get("model")
    if signed != served_model:
        return f"the completion is signed {_storable(str(signed))}, not {served_model}"
    return None


def _client(base_url: str, timeout_s: float) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{base_url.rstrip('/')}/v1",
        api_key="none",
        max_retries=0,
        timeout=timeout_s,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


async def _ask_one(
    client: openai.AsyncOpenAI,
    served_model: str,
    prompt: ChatOrText,
    max_tokens: int,
    logprobs: int | None,
    seed: int | None,
    stop: Sequence[str] | None,
) -> Reply:
    chat = not isinstance(prompt, str)
    options: dict[str, Any] = {"model": served_model, "max_tokens": max_tokens, "temperature": 0}
    if seed is not None:
        options["seed"] = seed
    if stop:
        options["stop"] = list(stop)
    if logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
    started_s = time.monotonic()
    try:
        if isinstance(prompt, str):
            response = await client.completions.with_raw_response.create(prompt=prompt, **options)
        else:
            messages: Any = list(prompt)
            response = await client.chat.completions.with_raw_response.create(messages=messages, **options)
        payload = json.loads(response.http_response.content)
    except (openai.OpenAIError, ValueError, RecursionError) as error:
        return Reply(error=_describe(error), e2el_s=time.monotonic() - started_s)
    return _reply(payload, chat=chat, e2el_s=time.monotonic() - started_s)


def _describe(error: Exception) -> str:
    # The SDK says "Connection error." and keeps what it was about in the cause.
    cause = f" ({error.__cause__})" if isinstance(error, openai.APIConnectionError) and error.__cause__ else ""
    return _storable(f"{type(error).__name__}: {error}{cause}"[:_MAX_ERROR_CHARS])


def _reply(payload: Any, *, chat: bool, e2el_s: float | None = None) -> Reply:
    choices = _mapping(payload).get("choices")
    choice = _mapping(choices[0] if isinstance(choices, list) and choices else None)
    message = _mapping(choice.get("message")) if chat else choice
    if not choice or (chat and not isinstance(choice.get("message"), dict)):
        return Reply(error=_storable(f"no choice in the response: {json.dumps(payload)[:200]}"), e2el_s=e2el_s)
    usage = _mapping(_mapping(payload).get("usage"))
    steps = _mapping(choice.get("logprobs"))
    return Reply(
        text=_text(message.get("content" if chat else "text")) or "",
        reasoning=_text(message.get("reasoning")) or _text(message.get("reasoning_content")),
        finish_reason=_text(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        tokens=(_chat_steps(steps) if chat else _completion_steps(steps)) if steps else None,
        e2el_s=e2el_s,
    )


def _chat_steps(logprobs: Mapping[str, Any]) -> list[TokenStep] | None:
    content = logprobs.get("content")
    if not isinstance(content, list):
        return None
    steps = []
    for entry in map(_mapping, content):
        others = [_mapping(other) for other in entry.get("top_logprobs") or []]
        chosen = next((other for other in others if other.get("token") == entry.get("token")), None)
        # Dropped by position, not by text: two tokens may have the same text, half a character each.
        rivals = [(_token(other), _number(other.get("logprob"))) for other in others if other is not chosen]
        steps.append(_step(_token(entry), _number(entry.get("logprob")), rivals))
    return steps


def _completion_steps(logprobs: Mapping[str, Any]) -> list[TokenStep] | None:
    tokens, values, tops = (logprobs.get(key) for key in ("tokens", "token_logprobs", "top_logprobs"))
    if not isinstance(tokens, list) or not isinstance(values, list) or len(values) != len(tokens):
        return None
    if not isinstance(tops, list) or len(tops) != len(tokens):
        tops = [None] * len(tokens)
    steps = []
    for token, value, top in zip(tokens, values, tops, strict=True):
        rivals = [(_storable(text), _number(logprob)) for text, logprob in _mapping(top).items() if text != token]
        steps.append(_step(_storable(str(token)), _number(value), rivals))
    return steps


def _step(token: str, logprob: float | None, rivals: list[tuple[str, float | None]]) -> TokenStep:
    known = sorted(((text, value) for text, value in rivals if value is not None), key=lambda rival: -rival[1])
    runner_up, runner_up_logprob = known[0] if known else (None, None)
    close = {
        text: value for text, value in reversed(known[1:]) if logprob is not None and logprob - value <= CLOSE_NATS
    }
    return TokenStep(
        token=token, logprob=logprob, runner_up=runner_up, runner_up_logprob=runner_up_logprob, close=close
    )


def _token(entry: Mapping[str, Any]) -> str:
    raw = entry.get("bytes")
    if isinstance(raw, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in raw):
        try:
            return bytes(raw).decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return _storable(str(entry.get("token", "")))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return _storable(value) if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return round(float(value), 4) if good else None


def _storable(text: str) -> str:
    # JSON may spell half a surrogate pair, which no UTF-8 file can hold.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
