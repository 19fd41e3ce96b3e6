"""A stand-in for a Python interpreter with venv and pip, installed as an executable by `make`.

It "installs" requirements by writing their metadata into a folder beside itself, so that what runs after pip sees a
believable environment. Its behaviour is set by environment variables:

    FAKE_CALLS        file that each call's arguments are appended to, one JSON list a line
    FAKE_NO_TORCH     pip's configured places have no torch
    FAKE_INSTALL_SAYS pip install prints this and ends with status 1
    FAKE_INSTALL_KILLS pip install kills the process that called it, and goes on after so many seconds
    FAKE_INSTALL_S    pip install takes so many seconds
    FAKE_DOWNLOAD     file that pip download puts into its destination; without it pip download fails
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import shutil
import signal
import sys
import time

HERE = pathlib.Path(__file__).absolute().parent
SITE = HERE.parent / "site"


def make(path: pathlib.Path) -> pathlib.Path:
    """Write the executable; -IS keeps it from seeing any installed package but the ones it pretends to have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -IS\n" + pathlib.Path(__file__).read_text())
    path.chmod(0o755)
    return path


def pip_install(arguments: list[str]) -> int:
    if "--dry-run" in arguments:
        wanted = arguments[-1]
        if os.environ.get("FAKE_NO_TORCH"):
            print("ERROR: Could not find a version that satisfies the requirement", wanted)
            print("ERROR: No matching distribution found for", wanted)
            return 1
        print("Would install", wanted)
        return 0
    time.sleep(float(os.environ.get("FAKE_INSTALL_S", "0")))
    if os.environ.get("FAKE_INSTALL_KILLS"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(float(os.environ["FAKE_INSTALL_KILLS"]))
        sys.stdout = io.StringIO()  # nobody reads it any more
    from_file = "-r" in arguments
    lines = pathlib.Path(arguments[arguments.index("-r") + 1]).read_text().split() if from_file else arguments[-1:]
    for line in lines:
        name, _, version = line.partition("==")
        print(f"Collecting {line}")
        folder = SITE / f"{name.replace('-', '_')}-{version or '9.9.9'}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version or '9.9.9'}\n")
    if os.environ.get("FAKE_INSTALL_SAYS"):
        print(os.environ["FAKE_INSTALL_SAYS"])
        return 1
    print("Installing collected packages:", ", ".join(lines))
    command = HERE / "vllm"
    command.write_text("#!/bin/sh\necho 9.9.9\n")
    command.chmod(0o755)
    return 0


def pip_download(arguments: list[str]) -> int:
    if not os.environ.get("FAKE_DOWNLOAD"):
        print("ERROR: No matching distribution found for", arguments[-1])
        return 1
    shutil.copy(os.environ["FAKE_DOWNLOAD"], arguments[arguments.index("--dest") + 1])
    return 0


def main() -> int:
    arguments = sys.argv[1:]
    if os.environ.get("FAKE_CALLS"):
        with pathlib.Path(os.environ["FAKE_CALLS"]).open("a") as calls:
            calls.write(json.dumps(arguments) + "\n")
    if arguments[:2] == ["-m", "venv"]:
        target = pathlib.Path(arguments[2]) / "bin" / "python"
        target.parent.mkdir(parents=True)
        shutil.copy(__file__, target)
        return 0
    if arguments[:2] == ["-m", "pip"]:
        return pip_install(arguments) if "install" in arguments else pip_download(arguments)
    code = arguments.index("-c")
    sys.argv = arguments[code:]
    if sys.argv[1] == "import vllm":
        return 0 if list(SITE.glob("vllm-*.dist-info")) else 1
    if "sysconfig" in sys.argv[1]:
        print(SITE)
        return 0
    sys.path.insert(0, str(SITE))
    source = sys.argv.pop(1)
    exec(source, {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
