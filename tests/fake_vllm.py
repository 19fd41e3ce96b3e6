#!/usr/bin/env python3
"""A fake vLLM server: the same command line, processes, log lines and HTTP API, in milliseconds, with faults to order.

    python fake_vllm.py serve MODEL --host 127.0.0.1 --port 8000 --served-model-name NAME [vLLM flags]

    python fake_vllm.py stray JSON     a process that some server left behind, see Stray

With `tests/fake_site` on PYTHONPATH, `python -m vllm.entrypoints.cli.main serve MODEL ...` runs it too.

The engine is a child process titled `VLLM::EngineCore`; what it generates depends on *its own* environment. Variables:

    FAKE_SWITCH                 the switch under test; how fast the engine is depends on it
    VLLM_FAKE_SWITCH            the same under a name that the server knows; it comes first
    FAKE_READS                  how the engine reads the switch: exact (default); truthiness: anything but the empty
                                text is "fast"; nothing: not at all
    FAKE_SPEEDS                 JSON, switch value -> speed factor; default {"fast": 1.5}
    FAKE_TPOT_S                 seconds an output token (default 0.0002)
    FAKE_PREFILL_S_PER_TOKEN    seconds a prompt token that is not in the prefix cache (default 0.000002)
    FAKE_ANSWERS                JSON lines with `question` and `answer`; a prompt whose last known question is one of
                                them is answered with its answer
    FAKE_DRIFT                  file: every server that starts adds a line to it, and is 6% faster for each before it
    FAKE_WORKERS                number of `VLLM::Worker` processes below the engine (default 0)
    FAKE_GPU_DIR                folder in which the engine says what it does to the fake GPU (tests/fake_nvml)
    FAKE_FAULTS                 JSON object, fault -> argument, see FAULTS

A fault's argument may be an object with `when`: {VARIABLE: value}; then the fault applies only in a server that was
started with those values (`null`: with the variable unset). The rest of the object is the argument, or its `arg`.
Faults of single requests take `requests` (indices in order of arrival), `from` (first index), `every` (each k-th) and
`at_least_max_tokens` in that object; without these they hit every request.
"""

from __future__ import annotations

import sys
import time

STARTED = time.monotonic()

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import runpy  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import zlib  # noqa: E402
from collections.abc import MutableMapping  # noqa: E402
from importlib.metadata import entry_points  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

VERSION = "0.32.0+fake"
BLOCK = 16
CACHE_LOAD_LINE = "Directly load the compiled graph(s) for compile range (1, 2048) from the cache, took 0.001 s"

FAULTS = {
    # The environment the engine shows or has.
    "wipe_environ": "all | prefix | middle | tail | title: the engine overwrites its environment block so",
    "child_env": "object: the engine is spawned with these values (null: without them)",
    "worker_env": "object: the last worker is spawned with these values (null: without them)",
    "late_environ": "object: the engine sets os.environ so after it started, before it reads the switch",
    "later_environ": "object: the same after its plugins are loaded",
    # Starting.
    "slow_start_s": "seconds before anything listens",
    "health_before_ready_s": "listens at once, /health and /v1/models answer, completions only after these seconds",
    "exit_after_s": "exit status 1 this long after the start, whatever else happened",
    "die": "object or list of them: at = before_listen | after_health | after_first_completion | after_requests |"
    " at_stop; n (requests), code (exit status) or signal (name), who = server | engine",
    "completion_hangs": "true, or request selection: completions never return",
    "engine_dead_server_lives": "the engine's death is not noticed: /health stays 200, completions hang",
    # Stopping.
    "ignore_signals": "list of signal names the server ignores",
    "engine_survives": "true | stubborn: the engine outlives the server (stubborn: and ignores SIGTERM and SIGINT)",
    "shm_leak": "true: leaves a segment psm_* in /dev/shm",
    "stray": "object: how = later (waits for the port, then serves it) | shares (holds the listening socket too) |"
    " takes (has it alone) | gpu (computes on the fake GPU), after_requests, pid_file: a process that is in no tree,"
    " session or environment of ours; of these, only later outlives the server",
    # The log.
    "unknown_env_warning": "name or list: the unknown-variable warning names it",
    "cache_load_line": "true: the log says that a compiled graph was loaded from a cache",
    "quiet_cache_load": "true: the log does not say it where one is",
    "log_lines": "list of lines the engine prints",
    "plugin_api_server_only": "true, or list of plugins that are loaded in the API server only",
    "plugin_not_in_worker": "true: the last worker loads no plugin",
    "plugin_not_called": "true: no plugin's forward() is called in the engine and the workers",
    # Caches.
    "cache_unused": "true, or list of variables: nothing is written there",
    "default_cache_write": "true: writes below ~/.cache/vllm whatever VLLM_CACHE_ROOT says",
    # The GPU.
    "gpu": "object: what NVML shows of the engine's device: sm_clock_mhz, mem_clock_mhz, power_w, temperature_c,"
    " utilization (percent), reasons (names), memory_bytes, uuid, power_limit_w, energy_scale, energy_wraps_j",
    # Compiling late.
    "jit": "object: line (printed), file (VARIABLE/path, written), and request selection: compiled for such a request",
    # Counting.
    "count_extra": "object: counter -> number added, and request selection: work that no client asked for",
    "counters_missing": "list of counters that /metrics does not export",
    "counters_late_s": "seconds after which /metrics shows what was counted",
    # The profiler.
    "trace": "object: at = start | stop (that call fails; dies: the server with it), missing (no trace), truncated,"
    " garbage, no_steps, cpu_only (no device activity), rows_short (rows fewer in a step), ranks, others (kernels of the"
    " other ranks), own_names (every rank runs a kernel of its name), kernels (object: decode, prefill = names that ran)",
    # Answers to requests.
    "served_name": "model name that /v1/models shows and completions accept",
    "signs_as": "model name that completions are signed with",
    "config": "object: dotted key -> value, over the vllm_config of /server_info",
    "vllm_env": "object: name -> value, over the vllm_env of /server_info",
    "other_client": "object: after_requests, requests: another client sends so many completions at that time",
    "no_metrics": "true: /metrics is 404",
    "prefix_hits": "number: share of prompt tokens counted as prefix-cache hits",
    "http_errors": "object: status (500), and request selection",
    "stream_error": "object: after_tokens (1), and request selection: an error event inside the stream",
    "stream_close": "object: after_tokens (1), and request selection: the connection closes early",
    "short_outputs": "object: tokens, and request selection: ends there with finish_reason stop; claims: what usage says",
    "long_outputs": "object: tokens, and request selection: so many tokens more than asked",
    "extra_prompt_tokens": "number added to usage.prompt_tokens",
    "missing_usage": "true, or request selection: no usage",
    "tokens_per_chunk": "number of tokens a stream chunk carries",
    "empty_chunks": "true: role-only and empty chunks and a comment line come first",
    "reasoning": "number of leading tokens of a chat stream sent as `reasoning`, in turn with `reasoning_content`",
    "answers": "object: wrong, truncated, reworded = lists of question indices, or true for all",
}
KNOWN_VLLM = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_DO_NOT_TRACK", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_FAKE_SWITCH",
    "VLLM_HOST_IP",
    "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS", "VLLM_PORT", "VLLM_RPC_BASE_PATH",
    "VLLM_SERVER_DEV_MODE", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_WORKER_MULTIPROC_METHOD",
}  # fmt: skip
CACHE_FILES = {
    "VLLM_CACHE_ROOT": "modelinfos/fake-model.json",
    "TORCHINDUCTOR_CACHE_DIR": "fxgraph/ab/graph.py",
    "TRITON_CACHE_DIR": "K7QZ/kernel.json",
    "FLASHINFER_WORKSPACE_BASE": ".cache/flashinfer/0.6/ops.so",
    "CUDA_CACHE_PATH": "index",
}


def load_faults() -> dict[str, Any]:
    """The faults that apply in this process, arguments unwrapped."""
    faults = json.loads(os.environ.get("FAKE_FAULTS") or "{}")
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown:
        sys.exit(f"fake_vllm: unknown faults {unknown}; known: {sorted(FAULTS)}")
    active = {}
    for name, arg in faults.items():
        if isinstance(arg, dict) and "when" in arg:
            when = arg["when"]
            if any(os.environ.get(key) != value for key, value in when.items()):
                continue
            rest = {key: value for key, value in arg.items() if key != "when"}
            arg = rest.get("arg", True) if set(rest) <= {"arg"} else rest
        if arg is not False and arg is not None:
            active[name] = arg
    return active


def drift() -> float:
    """How fast this machine is by now, as FAKE_DRIFT has it."""
    if "FAKE_DRIFT" not in os.environ:
        return 1.0
    with Path(os.environ["FAKE_DRIFT"]).open("a+") as file:
        file.seek(0)
        factor = 1.06 ** len(file.readlines())
        file.write("started\n")
    log("APIServer", f"fake machine: {factor:.3f} times as fast")
    return float(factor)


def read_switch() -> str:
    """What this process makes of the switch."""
    given = os.environ.get("VLLM_FAKE_SWITCH", os.environ.get("FAKE_SWITCH", ""))
    how = os.environ.get("FAKE_READS", "exact")
    if how == "exact":
        return given
    return "fast" if how == "truthiness" and given else ""


def log(role: str, text: str, level: str = "INFO", where: str = "fake_vllm.py:1") -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    # In one piece: lines of processes that start at the same time must not run into each other.
    os.write(2, f"({role} pid={os.getpid()}) {level} {stamp} [{where}] {text}\n".encode())


def load_plugins(role: str, skip: set[str], *, call: bool = False) -> None:
    """As vLLM does in every process: filter by VLLM_PLUGINS, call; log failures, and at DEBUG what was loaded.

    Args:
        role: Of the process, for the log.
        skip: Plugins that are left out.
        call: The process runs the model: it calls the plugins' `forward()`, where they have one.
    """

    def debug(text: str, where: str) -> None:
        if os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            log(role, text, "DEBUG", where)

    found = [plugin for plugin in entry_points(group="vllm.general_plugins") if plugin.name not in skip]
    if not found:
        return
    debug("Available plugins for group vllm.general_plugins:", "__init__.py:43")
    for plugin in found:
        debug(f"- {plugin.name} -> {plugin.value}", "__init__.py:45")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        debug("All plugins in this group will be loaded. Set `VLLM_PLUGINS` to control which plugins to load.",
              "__init__.py:48")  # fmt: skip
    for plugin in found:
        if allowed is not None and plugin.name not in allowed.split(","):
            continue
        if allowed is not None:
            debug(f"Loading plugin {plugin.name}", "__init__.py:55")
        try:
            plugin.load()()
            if call:
                # The model's first step, in a plugin that has something for it.
                getattr(sys.modules[plugin.module], "forward", lambda: None)()
        except Exception as error:
            log(role, f"Failed to load plugin {plugin.name}\n{error!r}", "ERROR", "__init__.py:60")


# --- the engine process ---------------------------------------------------------------------------------------------


def memory_fields() -> tuple[int, int, int, int]:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46]), int(fields[47]), int(fields[48])


def rename_process(title: str, wipe: str | None) -> None:
    """Overwrite argv in place, and the environment block behind it when told to, as setproctitle does."""
    arg_start, arg_end, env_start, env_end = memory_fields()
    Path("/proc/self/comm").write_text(title[:15])
    room = arg_end - arg_start
    raw = title.encode()[: room - 1]
    ctypes.memmove(arg_start, raw + b"\0" * (room - len(raw)), room)
    size = env_end - env_start
    if wipe == "all":
        ctypes.memset(env_start, 0, size)
    elif wipe == "prefix":
        ctypes.memset(env_start, 0, size * 2 // 3)
    elif wipe == "middle":
        ctypes.memset(env_start + size // 3, 0, size // 3)
    elif wipe == "tail":
        ctypes.memset(env_start + size // 2, 0, size - size // 2)
    elif wipe == "title":
        text = b"run over by a title" + b"\0"
        ctypes.memmove(env_start, text, len(text))
    elif wipe is not None:
        sys.exit(f"fake_vllm: wipe_environ cannot be {wipe!r}")


def write_caches(faults: dict[str, Any], eager: bool) -> str | None:
    """Write what a fresh compile writes; return the switch value baked into a compiled graph that was found instead."""
    unused = faults.get("cache_unused", [])
    for variable, name in CACHE_FILES.items():
        if variable in os.environ and unused is not True and variable not in unused:
            path = Path(os.environ[variable]) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    above = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/nonexistent')}/.cache"
    home = Path(above) / "vllm"
    if faults.get("default_cache_write"):
        (home / "torch_compile_cache/stray").mkdir(parents=True, exist_ok=True)
        (home / "torch_compile_cache/stray/graph.py").write_text("{}")
    if eager or unused is True or "VLLM_CACHE_ROOT" in unused:
        return None
    compiled = Path(os.environ.get("VLLM_CACHE_ROOT", home)) / "torch_compile_cache/5f3a/rank_0_0/backbone"
    log("EngineCore", f"Using cache directory: {compiled} for vLLM's torch.compile", where="backends.py:1089")
    log("EngineCore", "Dynamo bytecode transform time: 0.01 s", where="backends.py:1148")
    graph = compiled / "graph.json"
    if graph.exists():
        if not faults.get("quiet_cache_load"):
            log("EngineCore", CACHE_LOAD_LINE, where="backends.py:292")
        return str(json.loads(graph.read_text()))
    compiled.mkdir(parents=True)
    graph.write_text(json.dumps(read_switch()))
    log("EngineCore", "Compiling a graph for compile range (1, 2048) takes 0.01 s", where="backends.py:305")
    return None


def limit_lifetime() -> None:
    """Nothing is left for good by a test that ends badly, whatever fault was asked for."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(900)


def engine_main(eager: bool) -> None:
    limit_lifetime()
    faults = load_faults_of_parent()
    survives = faults.get("engine_survives")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if survives == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rename_process("VLLM::EngineCore", faults.get("wipe_environ"))
    change(os.environ, faults.get("late_environ", {}))
    only = faults.get("plugin_api_server_only", [])
    names = {plugin.name for plugin in entry_points(group="vllm.general_plugins")}
    load_plugins("EngineCore", names if only is True else set(only), call=not faults.get("plugin_not_called"))
    change(os.environ, faults.get("later_environ", {}))
    log("EngineCore", f"Initializing a V1 LLM engine (v{VERSION}) with config: model='fake', dtype=torch.float32, "
        f"enforce_eager={eager}, enable_prefix_caching=True", where="core.py:107")  # fmt: skip
    log("EngineCore", "Using FAKE_ATTN backend.", where="fake.py:88")
    baked = write_caches(faults, eager)
    if faults.get("cache_load_line"):
        log("EngineCore", CACHE_LOAD_LINE, where="backends.py:292")
    switch = read_switch() if baked is None else baked
    log("EngineCore", f"fake kernels: FAKE_SWITCH={switch}", where="fake.py:90")
    for line in faults.get("log_lines", []):
        log("EngineCore", line)
    if "FAKE_GPU_DIR" in os.environ:
        state = {"memory_bytes": 4 * 2**30, **faults.get("gpu", {})}
        (Path(os.environ["FAKE_GPU_DIR"]) / f"{os.getpid()}.json").write_text(json.dumps(state))
    count = int(os.environ.get("FAKE_WORKERS", "0"))
    workers = [start_worker(faults if number == count - 1 else {}) for number in range(count)]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    speeds = json.loads(os.environ.get("FAKE_SPEEDS") or '{"fast": 1.5}')
    print(json.dumps({"speed": speeds.get(switch, 1.0), "switch": switch}), flush=True)
    with contextlib.suppress(OSError):
        while sys.stdin.buffer.read(4096):
            pass
    if survives:
        while True:
            time.sleep(60)
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def change(environ: MutableMapping[str, str], values: dict[str, str | None]) -> None:
    for key, value in values.items():
        environ.pop(key, None) if value is None else environ.__setitem__(key, value)


def start_worker(faults: dict[str, Any]) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    change(env, faults.get("worker_env", {}))
    how = ["bare"] if faults.get("plugin_not_in_worker") else ["idle"] if faults.get("plugin_not_called") else []
    argv = [sys.executable, __file__, "--worker", *how]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def worker_main(how: str) -> None:
    limit_lifetime()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rename_process("VLLM::Worker", None)
    if how != "bare":
        load_plugins("Worker", set(), call=how != "idle")
    print("up", flush=True)
    while sys.stdin.buffer.read(4096):
        pass


def load_faults_of_parent() -> dict[str, Any]:
    # The server has already applied `when`, with its own environment: an engine with other values must not undo that.
    faults = json.loads(sys.argv[2])
    assert isinstance(faults, dict)
    return faults


# --- the API server process -----------------------------------------------------------------------------------------


class Close(Exception):
    """Close this connection without another byte."""


class HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def words(text: str) -> list[str]:
    return re.findall(r"\s*\S+", text)


def token_id(word: str) -> int:
    return zlib.crc32(word.encode()) % 30000


class Server:
    """One fake server: its flags, its faults, its counters."""

    def __init__(self, model: str, flags: dict[str, str]) -> None:
        self.faults = load_faults()
        self.model = model
        self.flags = flags
        self.host = flags.get("--host", "127.0.0.1")
        self.port = int(flags.get("--port", "8000"))
        self.name = str(self.faults.get("served_name", flags.get("--served-model-name", model)))
        self.max_model_len = int(flags.get("--max-model-len", "8192"))
        self.slots = asyncio.Semaphore(int(flags.get("--max-num-seqs", "256")))
        self.tpot = float(os.environ.get("FAKE_TPOT_S", "0.0002"))
        self.prefill = float(os.environ.get("FAKE_PREFILL_S_PER_TOKEN", "0.000002"))
        self.counters = dict.fromkeys(
            ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
             "num_preemptions"), 0.0)  # fmt: skip
        self.counted: list[tuple[float, str, float]] = []
        self.running = 0
        self.arrived = 0
        self.blocks: set[int] = set()
        self.speed = 1.0
        self.engine: asyncio.subprocess.Process | None = None
        self.engine_dead = False
        self.listener: asyncio.Server | None = None
        self.done: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = asyncio.Event()
        self.exit_code = 0
        profiler = runpy.run_path(str(Path(__file__).with_name("fake_profiler.py")))["Profiler"]
        self.profiler = profiler(flags, self.faults.get("trace", {}), "fast" if read_switch() == "fast" else "plain")
        self.answers: list[tuple[str, str]] = []
        if os.environ.get("FAKE_ANSWERS"):
            lines = Path(os.environ["FAKE_ANSWERS"]).read_text().splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
            self.answers = [(row["question"].strip(), row["answer"]) for row in rows]

    # Life and death.

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        ignored = self.faults.get("ignore_signals", [])
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, (lambda: None) if number.name in ignored else self.stopping.set)
        if "exit_after_s" in self.faults:
            wait = float(self.faults["exit_after_s"]) - (time.monotonic() - STARTED)
            loop.call_later(max(wait, 0), self.leave, 1)
        log("APIServer", f"vLLM server version {VERSION}", where="utils.py:299")
        shown = {key.lstrip("-").replace("-", "_"): value for key, value in self.flags.items()}
        log("APIServer", f"non-default args: {shown}", where="utils.py:233")
        for name in sorted(os.environ):
            if name.startswith("VLLM_") and name not in KNOWN_VLLM:
                log("APIServer", f"Unknown vLLM environment variable detected: {name}", "WARNING", "envs.py:2027")
        warned = self.faults.get("unknown_env_warning", [])
        for name in [warned] if isinstance(warned, str) else warned:
            log("APIServer", f"Unknown vLLM environment variable detected: {name}", "WARNING", "envs.py:2027")
        load_plugins("APIServer", set())
        if self.faults.get("shm_leak"):
            # Held open, as a mapped one is.
            os.open(f"/dev/shm/psm_{os.getpid():08x}", os.O_CREAT | os.O_RDWR, 0o600)
        await self.start_engine()
        early = self.faults.get("health_before_ready_s")
        if not early:
            await self.pause(float(self.faults.get("slow_start_s", 0)))
        self.die("before_listen")
        if self.stopping.is_set():
            return await self.stop()
        self.ready_at = time.monotonic() + float(early or 0)
        try:
            self.listener = await asyncio.start_server(self.connection, self.host, self.port, backlog=512)
        except OSError as error:
            log("APIServer", f"OSError: [Errno {error.errno}] {error.strerror}", "ERROR")
            self.exit_code = 1
            return await self.stop()
        log("APIServer", f"Starting vLLM server on http://{self.host}:{self.port}", where="launcher.py:29")
        log("APIServer", "Application startup complete.", where="on.py:62")
        watch = asyncio.create_task(self.watch_engine())
        await self.stopping.wait()
        watch.cancel()
        self.listener.close()
        return await self.stop()

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)

    async def start_engine(self) -> None:
        env = dict(os.environ)
        change(env, self.faults.get("child_env", {}))
        self.engine = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--engine-core", json.dumps(self.faults), *(
                ["--enforce-eager"] if "--enforce-eager" in self.flags else []),
            env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)  # fmt: skip
        assert self.engine.stdout is not None
        line = await self.engine.stdout.readline()
        if not line:
            log("APIServer", "RuntimeError: Engine core initialization failed. See root cause above.", "ERROR")
            sys.exit(1)
        self.speed = float(json.loads(line)["speed"]) * drift()

    async def watch_engine(self) -> None:
        assert self.engine is not None
        await self.engine.wait()
        self.engine_dead = True
        if self.faults.get("engine_dead_server_lives"):
            return
        log("APIServer", "EngineDeadError: EngineCore encountered an issue.", "ERROR", "async_llm.py:704")
        await asyncio.sleep(0.05)
        self.leave(1)

    # What is ordered for a moment under load.

    def due(self, name: str) -> dict[str, Any] | None:
        """A fault whose `after_requests` have arrived, once."""
        order: dict[str, Any] | None = self.faults.get(name)
        if order is None or name in self.done or self.arrived < order["after_requests"]:
            return None
        self.done.add(name)
        return order

    def at_request(self) -> None:
        if order := self.due("stray"):
            self.leave_stray(order)
        if order := self.due("other_client"):
            self.tasks.add(asyncio.create_task(self.send_others(order["requests"])))

    def leave_stray(self, order: dict[str, Any]) -> None:
        assert self.listener is not None
        number = -1 if order["how"] in ("later", "gpu") else os.dup(self.listener.sockets[0].fileno())
        what = {"how": order["how"], "fd": number, "port": self.port, "name": self.name, "server": os.getpid(),
                "max_model_len": self.max_model_len, "gpu_dir": os.environ.get("FAKE_GPU_DIR")}  # fmt: skip
        if order["how"] == "takes":
            self.listener.close()
        if os.fork() == 0:
            # The usual two steps of a daemon: a session of its own, and no parent that anybody knows.
            os.setsid()
            second = os.fork()
            if second:
                Path(order["pid_file"]).write_text(str(second))
                os._exit(0)
            if number >= 0:
                os.set_inheritable(number, True)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            os.execve(sys.executable, [sys.executable, __file__, "stray", json.dumps(what)], {})
        os.wait()
        if number >= 0:
            os.close(number)

    async def send_others(self, count: int) -> None:
        for number in range(count):
            first = 20000 + 100 * number
            ask = {"model": self.name, "prompt": list(range(first, first + 20)), "max_tokens": 20}
            body = json.dumps(ask).encode()
            reader, writer = await asyncio.open_connection(self.host, self.port)
            head = f"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await reader.read()
            writer.close()

    def leave(self, code: int) -> None:
        self.exit_code = code
        self.stopping.set()

    def die(self, stage: str) -> None:
        orders = self.faults.get("die", [])
        for order in [orders] if isinstance(orders, dict) else orders:
            if order["at"] != stage or (stage == "after_requests" and self.arrived < order["n"]):
                continue
            if order.get("who") == "engine":
                assert self.engine is not None
                with contextlib.suppress(ProcessLookupError):
                    self.engine.send_signal(signal.Signals[order.get("signal", "SIGKILL")])
                continue
            log("APIServer", f"dying {stage}, as asked", "ERROR")
            if "signal" in order:
                os.kill(os.getpid(), signal.Signals[order["signal"]])
            os._exit(order.get("code", 1))

    async def stop(self) -> int:
        self.die("at_stop")
        log("APIServer", "Shutting down", where="server.py:262")
        assert self.engine is not None
        assert self.engine.stdin is not None
        self.engine.stdin.close()
        if not self.faults.get("engine_survives"):
            with contextlib.suppress(ProcessLookupError):
                await self.engine.wait()
        return self.exit_code

    # HTTP.

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ", 2)
                headers = {key.strip().lower(): value.strip() for key, _, value in (h.partition(":") for h in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                try:
                    await self.route(writer, method, target.partition("?")[0], headers, body)
                except HttpError as error:
                    kind = "BadRequestError" if error.status < 500 else "InternalServerError"
                    await self.send(writer, {"error": {"message": str(error), "type": kind, "param": None,
                                                       "code": error.status}}, error.status)  # fmt: skip
                if headers.get("connection", "").lower() == "close":
                    break
        except (Close, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def send(self, writer: asyncio.StreamWriter, data: Any, status: int = 200) -> None:
        raw = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        kind = "text/plain; version=0.0.4; charset=utf-8" if isinstance(data, str) else "application/json"
        writer.write(f"HTTP/1.1 {status} X\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n"
                     f"content-length: {len(raw)}\r\n\r\n".encode() + raw)  # fmt: skip
        await writer.drain()

    async def route(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        if path == "/health":
            await self.send(
                writer, "", 503 if self.engine_dead and "engine_dead_server_lives" not in self.faults else 200
            )
            self.die("after_health")
        elif path == "/version":
            await self.send(writer, {"version": VERSION})
        elif path == "/v1/models":
            card = {"id": self.name, "object": "model", "created": 1, "owned_by": "vllm", "root": "fake",
                    "parent": None, "max_model_len": self.max_model_len}  # fmt: skip
            await self.send(writer, {"object": "list", "data": [card]})
        elif path == "/server_info" and os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            await self.send(writer, self.server_info())
        elif method == "POST" and path in ("/start_profile", "/stop_profile") and self.profiler.folder is not None:
            await self.profile(writer, path)
        elif path == "/metrics" and not self.faults.get("no_metrics"):
            await self.send(writer, self.metrics())
        elif method == "POST" and path in ("/tokenize", "/v1/completions", "/v1/chat/completions"):
            request = json.loads(body)
            if request.get("model") not in (None, self.name):
                raise HttpError(404, f"The model `{request['model']}` does not exist.")
            if path == "/tokenize":
                ids = [token_id(word) for word in words(self.prompt_text(request))]
                await self.send(writer, {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})
            else:
                await self.complete(writer, request, "chat" in path, headers)
        else:
            raise HttpError(404, "Not Found")

    async def profile(self, writer: asyncio.StreamWriter, path: str) -> None:
        """Start or stop the profiler; `at` of the fault names the call that goes wrong."""
        fault = self.faults.get("trace", {})
        if path == f"/{fault.get('at')}_profile":
            if fault.get("dies"):
                self.leave(1)
            raise HttpError(500, "the profiler failed")
        self.profiler.start() if path == "/start_profile" else self.profiler.stop()
        await self.send(writer, "")

    def server_info(self) -> dict[str, Any]:
        """As vLLM's development mode answers `?config_format=json`, with a few of its several hundred values."""
        eager = "--enforce-eager" in self.flags
        cache_dir = f"{os.environ.get('VLLM_CACHE_ROOT', '')}/torch_compile_cache/5f3a"
        config: dict[str, Any] = {
            "model_config": {
                "model": self.model, "served_model_name": self.name, "dtype": "torch.float32", "seed": 0,
                "max_model_len": self.max_model_len, "enforce_eager": eager, "quantization": None,
            },
            "cache_config": {
                "block_size": BLOCK, "gpu_memory_utilization": 0.9,
                "enable_prefix_caching": "--no-enable-prefix-caching" not in self.flags,
            },
            "parallel_config": {
                "tensor_parallel_size": 1, "data_parallel_size": 1, "distributed_executor_backend": "uni",
            },
            "scheduler_config": {
                "max_num_seqs": int(self.flags.get("--max-num-seqs", "256")),
                "max_num_batched_tokens": int(self.flags.get("--max-num-batched-tokens", "2048")),
                "enable_chunked_prefill": True,
            },
            "compilation_config": {"mode": 0 if eager else 3, "cache_dir": "" if eager else cache_dir},
            "additional_config": {},
            "instance_id": f"{os.getpid() % 0xFFFFF:05x}",
        }  # fmt: skip
        for dotted, value in self.faults.get("config", {}).items():
            part, _, key = dotted.rpartition(".")
            (config[part] if part else config)[key] = value
        env: dict[str, Any] = {name: os.environ[name] for name in sorted(KNOWN_VLLM & set(os.environ))}
        if "VLLM_FAKE_SWITCH" in env:
            truthiness = os.environ.get("FAKE_READS") == "truthiness"
            env["VLLM_FAKE_SWITCH"] = bool(env["VLLM_FAKE_SWITCH"]) if truthiness else env["VLLM_FAKE_SWITCH"]
        change(env, self.faults.get("vllm_env", {}))
        system = {"os": "Fake", "python_version": sys.version, "torch_version": "0", "is_cuda_available": "False"}
        return {"vllm_config": config, "vllm_env": env, "system_env": system}

    def metrics(self) -> str:
        label = f'{{engine="0",model_name="{self.name}"}}'
        lines = []
        late = time.monotonic() - float(self.faults.get("counters_late_s", 0))
        for key, value in self.counters.items():
            if key in self.faults.get("counters_missing", []):
                continue
            value -= sum(amount for moment, name, amount in self.counted if name == key and moment > late)
            lines += [f"# HELP vllm:{key}_total Fake.", f"# TYPE vllm:{key}_total counter"]
            lines.append(f"vllm:{key}_total{label} {value}")
        lines += ["# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running{label} {float(self.running)}"]
        return "\n".join(lines) + "\n"

    # Generation.

    def count(self, name: str, amount: float) -> None:
        self.counters[name] += amount
        if "counters_late_s" in self.faults:
            self.counted.append((time.monotonic(), name, amount))

    def extra_work(self, index: int, request: dict[str, Any]) -> None:
        """What a request sets off beside its answer."""
        jit = self.hit("jit", index, request)
        if jit and "line" in jit:
            log("EngineCore", jit["line"], "WARNING", "jit_monitor.py:103")
        if jit and "file" in jit:
            variable, _, rest = jit["file"].partition("/")
            path = Path(os.environ[variable]) / rest
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        for name, amount in (self.hit("count_extra", index, request) or {}).items():
            if name in self.counters:
                self.count(name, amount)

    def hit(self, name: str, index: int, request: dict[str, Any]) -> Any:
        """The argument of a fault of single requests if it hits this one, else None."""
        arg = self.faults.get(name)
        if not isinstance(arg, dict):
            return arg
        chosen = arg.get("requests")
        if chosen is not None and index not in chosen:
            return None
        if index < arg.get("from", 0) or index % arg.get("every", 1):
            return None
        return arg if self.asked(request) >= arg.get("at_least_max_tokens", 0) else None

    @staticmethod
    def asked(request: dict[str, Any]) -> int:
        return int(request.get("max_completion_tokens") or request.get("max_tokens") or 16)

    @staticmethod
    def prompt_text(request: dict[str, Any]) -> str:
        if "messages" not in request:
            return str(request["prompt"])
        return "\n".join(f"{message['role']}: {message['content']}" for message in request["messages"])

    def output(self, request: dict[str, Any], ids: list[int], wanted: int) -> tuple[list[str], str]:
        """The tokens of the answer and how it ends."""
        if isinstance(request.get("prompt"), str) or "messages" in request:
            text = self.prompt_text(request)
            place, best = max(((text.rfind(question), i) for i, (question, _) in enumerate(self.answers)),
                              default=(-1, -1))  # fmt: skip
            if place >= 0:
                return self.answer(best, wanted)
        seed = zlib.crc32(repr(ids).encode())
        return [f" w{(seed + 7919 * i) % 9973}" for i in range(wanted)], "length"

    def answer(self, index: int, wanted: int) -> tuple[list[str], str]:
        def chosen(kind: str) -> bool:
            which = self.faults.get("answers", {}).get(kind, [])
            return which is True or index in which

        text = self.answers[index][1]
        if chosen("reworded"):
            text = "Put otherwise: " + text
        if chosen("wrong"):
            text = re.sub(r"####\s*\S+\s*$", "#### 424242", text)
        tokens = words(text)
        if chosen("truncated"):
            return tokens[: len(tokens) // 2], "length"
        return (tokens, "stop") if len(tokens) <= wanted else (tokens[:wanted], "length")

    def cached(self, ids: list[int]) -> int:
        """Prompt tokens found in the prefix cache; the last token is always computed."""
        if "--no-enable-prefix-caching" in self.flags:
            return 0
        key, hits, still = 0, 0, True
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hash((key, *ids[start : start + BLOCK]))
            still = still and key in self.blocks and start + BLOCK < len(ids)
            hits += BLOCK * still
            self.blocks.add(key)
        return hits

    async def complete(
        self, writer: asyncio.StreamWriter, request: dict[str, Any], chat: bool, headers: dict[str, str]
    ) -> None:
        index = self.arrived
        self.arrived += 1
        self.die("after_requests")
        self.at_request()
        error = self.hit("http_errors", index, request)
        if error:
            raise HttpError(error.get("status", 500) if isinstance(error, dict) else 500, "as asked")
        if self.hit("completion_hangs", index, request):
            await asyncio.sleep(3600)
        prompt = request.get("prompt")
        ids = prompt if isinstance(prompt, list) else [token_id(word) for word in words(self.prompt_text(request))]
        wanted = self.asked(request)
        if len(ids) + wanted > self.max_model_len:
            raise HttpError(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        self.profiler.request(len(ids), wanted)
        await asyncio.sleep(max(0.0, self.ready_at - time.monotonic()))
        async with self.slots:
            self.running += 1
            try:
                await self.generate(writer, request, chat, ids, wanted, index, headers)
            finally:
                self.running -= 1
        self.die("after_first_completion")

    async def generate(
        self, writer: asyncio.StreamWriter, request: dict[str, Any], chat: bool, ids: list[int], wanted: int,
        index: int, headers: dict[str, str],
    ) -> None:  # fmt: skip
        tokens, finish = self.output(request, ids, wanted)
        short = self.hit("short_outputs", index, request)
        if short and short["tokens"] < len(tokens):
            tokens, finish = tokens[: short["tokens"]], "stop"
        longer = self.hit("long_outputs", index, request)
        if longer:
            tokens = tokens + [f" more{i}" for i in range(longer["tokens"])]
        hits = self.cached(ids)
        start = time.monotonic() + self.prefill * (len(ids) - hits) / self.speed
        hits = round(max(hits, float(self.faults.get("prefix_hits", 0)) * len(ids)))
        usage: dict[str, Any] | None = {
            "prompt_tokens": len(ids) + int(self.faults.get("extra_prompt_tokens", 0)),
            "completion_tokens": int(short["claims"]) if short and "claims" in short else len(tokens),
        }
        assert usage is not None
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        usage["prompt_tokens_details"] = (
            {"cached_tokens": hits} if "--enable-prompt-tokens-details" in self.flags else None
        )
        if self.hit("missing_usage", index, request):
            usage = None
        name = headers.get("x-request-id") or f"{index:08x}"
        shell = {"id": ("chatcmpl-" if chat else "cmpl-") + name, "created": int(time.time()), "model": self.name}
        self.count("prompt_tokens", len(ids))
        self.count("prompt_tokens_cached", hits)
        self.count("prefix_cache_queries", len(ids))
        self.count("prefix_cache_hits", hits)
        self.extra_work(index, request)
        if "signs_as" in self.faults:
            shell["model"] = self.faults["signs_as"]
        if request.get("stream"):
            await self.stream(writer, request, chat, ids, tokens, finish, usage, shell, start, index)
        else:
            await self.until(start + self.tpot * len(tokens) / self.speed)
            self.count("generation_tokens", len(tokens))
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "stop_reason": None}
            choice["logprobs"] = self.logprobs(request, chat, tokens, 0)
            if chat:
                choice["message"] = {"role": "assistant", "content": "".join(tokens)}
            else:
                choice["text"] = "".join(tokens)
            kind = "chat.completion" if chat else "text_completion"
            await self.send(writer, {**shell, "object": kind, "choices": [choice], "usage": usage})

    async def until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))
        while self.engine_dead:
            if self.faults.get("engine_dead_server_lives"):
                await asyncio.sleep(3600)
            raise HttpError(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")

    async def stream(
        self, writer: asyncio.StreamWriter, request: dict[str, Any], chat: bool, ids: list[int], tokens: list[str],
        finish: str,
        usage: dict[str, Any] | None, shell: dict[str, Any], start: float, index: int,
    ) -> None:  # fmt: skip
        async def event(data: dict[str, Any] | str) -> None:
            text = data if isinstance(data, str) else "data: " + json.dumps(data)
            raw = (text + "\n\n").encode()
            writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
            await writer.drain()

        def chunk(piece: list[str], done: int, last: bool, field: str = "content") -> dict[str, Any]:
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish if last else None, "stop_reason": None}
            choice["logprobs"] = self.logprobs(request, chat, piece, done) if piece else None
            choice.update({"delta": {field: "".join(piece)}} if chat else {"text": "".join(piece)})
            if request.get("return_token_ids"):
                choice["token_ids"] = [token_id(token) for token in piece]
                if done == 0 and piece:
                    choice["prompt_token_ids"] = ids
            data = {**shell, "object": "chat.completion.chunk" if chat else "text_completion", "choices": [choice]}
            if usage and options.get("continuous_usage_stats"):
                count = done + len(piece)
                data["usage"] = {**usage, "completion_tokens": count, "total_tokens": usage["prompt_tokens"] + count}
            return data

        options = request.get("stream_options") or {}
        writer.write(b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                     b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip
        if self.faults.get("empty_chunks"):
            await event(chunk([], 0, False))
            await event(": ping")
        if chat or self.faults.get("empty_chunks"):
            first = chunk([], 0, False)
            if chat:
                first["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            await event(first)
        broken = self.hit("stream_error", index, request)
        closed = self.hit("stream_close", index, request)
        size = int(self.faults.get("tokens_per_chunk", 1))
        thinking = int(self.faults.get("reasoning", 0)) if chat else 0
        for done in range(0, len(tokens), size):
            try:
                piece = tokens[done : done + size]
                await self.until(start + self.tpot * (done + len(piece)) / self.speed)
            except HttpError as error:
                await event({"error": {"message": str(error), "type": "InternalServerError", "code": 500}})
                break
            if broken and done >= (broken.get("after_tokens", 1) if isinstance(broken, dict) else 1):
                await event({"error": {"message": "as asked", "type": "InternalServerError", "code": 500}})
                break
            if closed and done >= (closed.get("after_tokens", 1) if isinstance(closed, dict) else 1):
                raise Close
            self.count("generation_tokens", len(piece))
            field = "content" if done >= thinking else ("reasoning", "reasoning_content")[done % 2]
            await event(chunk(piece, done, done + size >= len(tokens), field))
        else:
            if usage and options.get("include_usage"):
                kind = "chat.completion.chunk" if chat else "text_completion"
                await event({**shell, "object": kind, "choices": [], "usage": usage})
        await event("data: [DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def logprobs(request: dict[str, Any], chat: bool, tokens: list[str], done: int) -> dict[str, Any] | None:
        asked = request.get("logprobs")
        if asked is None or asked is False:
            return None
        rivals = int(request.get("top_logprobs") or 0) if chat else int(asked)

        def values(token: str, place: int) -> list[tuple[str, float]]:
            gap = 0.05 + (zlib.crc32(token.encode()) % 100) / 25
            return [(token, -0.1), *((f" r{place}_{k}", -0.1 - gap * (k + 1)) for k in range(max(0, rivals - 1)))]

        if not chat:
            starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
            return {
                "text_offset": starts,
                "tokens": tokens,
                "token_logprobs": [-0.1] * len(tokens),
                "top_logprobs": [dict(values(token, done + i)) for i, token in enumerate(tokens)],
            }
        content = []
        for i, token in enumerate(tokens):
            top = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in values(token, done + i)]
            content.append({**top[0], "top_logprobs": top[:rivals]})
        return {"content": content}


# --- what a server leaves behind ------------------------------------------------------------------------------------


class Stray(Server):
    """What a server left behind: it serves that server's port under its name, or holds its GPU."""

    def __init__(self, what: dict[str, Any]) -> None:
        flags = {"--served-model-name": what["name"], "--max-model-len": str(what["max_model_len"])}
        super().__init__("stray", {**flags, "--port": str(what["port"])})
        self.what = what

    async def main(self) -> int:
        self.ready_at = 0.0
        if self.what["how"] == "gpu":
            state = json.dumps({"memory_bytes": 2**30})
            (Path(self.what["gpu_dir"]) / f"{os.getpid()}.json").write_text(state)
        elif self.what["fd"] >= 0:
            await asyncio.start_server(self.connection, sock=socket.socket(fileno=self.what["fd"]))
        else:
            while not await self.bound():
                await asyncio.sleep(0.002)
        while self.what["how"] == "later" or Path(f"/proc/{self.what['server']}").exists():
            await asyncio.sleep(0.005)
        return 0

    async def bound(self) -> bool:
        try:
            await asyncio.start_server(self.connection, self.host, self.port)
        except OSError:
            return False
        return True


def parse(argv: list[str]) -> tuple[str, dict[str, str]]:
    """The model and the flags; a flag without a value gets the empty string."""
    flags: dict[str, str] = {}
    loose: list[str] = []
    i = 0
    while i < len(argv):
        name, has_value, value = argv[i].partition("=")
        if not name.startswith("-"):
            loose.append(argv[i])
        elif has_value:
            flags[name] = value
        elif i + 1 < len(argv) and not argv[i + 1].startswith("--"):
            i += 1
            flags[name] = argv[i]
        else:
            flags[name] = ""
        i += 1
    if loose[:1] == ["serve"]:
        loose = loose[1:]
    return (loose[0] if loose else flags.get("--model", "fake")), flags


def main() -> int:
    if sys.argv[1:2] == ["--engine-core"]:
        engine_main("--enforce-eager" in sys.argv)
        return 0
    if sys.argv[1:2] == ["--worker"]:
        worker_main("".join(sys.argv[2:]))
        return 0
    limit_lifetime()
    if sys.argv[1:2] == ["stray"]:
        return asyncio.run(Stray(json.loads(sys.argv[2])).main())
    model, flags = parse(sys.argv[1:])

    async def serve() -> int:
        return await Server(model, flags).main()

    return asyncio.run(serve())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not sys.exit: connections that hang would hold the loop's executor; the server's death must be prompt.
    os._exit(code)
