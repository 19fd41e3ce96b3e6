"""The exception tree: what went wrong, with the context attached and the exit code it leads to.

    AbharnessError                exit 5
    ├── UsageError                exit 2   bad command line, folder or record
    │   ├── SpecError             exit 2   the experiment file cannot be run as written
    │   ├── RecordError           exit 2   a record on disk cannot be read
    │   │   └── NewerRecord       exit 2   a newer abharness wrote it
    │   └── TraceError            exit 2   nothing can be read of a profiler's trace
    ├── InstallError              exit 4   a managed server environment or model could not be made
    ├── ReplayError               exit 4   a replay could not be carried out; what it measured before is kept
    └── LaunchError               exit 4   one server launch failed; the others' records are kept
        ├── PreflightError                 the machine is not in a state to start (port, GPU, disk, model, vLLM)
        ├── ServerDied                     the server process ended before it was asked to
        ├── ServerNotReady                 no completion within `ready_timeout_s`
        ├── WrongServer                    the socket that answers is not held by our process tree
        ├── VerificationFailed             a declared switch is not what the processes show
        ├── LoadFailed                     the load phase could not be carried out
        │   └── ProfilerFailed             the server's profiler was not started or stopped
        ├── GpuError                       NVML does not answer for a GPU
        │   └── GpuLost                    the driver has lost the GPU: it fell off the bus or hangs
        └── TeardownError                  processes, port or GPU memory were not given back

An error carries facts as attributes; `str(error)` is one paragraph for people and `hint` the next step.
"""

from __future__ import annotations


class AbharnessError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        hint: What to do next, one sentence, or None.
        code: A validity code of the design (`env_mismatch`, ...) when the error is one, else None.
    """

    exit_code = 5

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def first_line(error: BaseException) -> str:
    """What another library says of an error, on one line; its kind where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class UsageError(AbharnessError):
    """The command line, a folder or a file given to a command cannot be used."""

    exit_code = 2


class SpecError(UsageError):
    """The experiment file cannot be run as written.

    Attributes:
        problems: One message a fault, each with file, line, field, what was found and what is allowed.
    """

    def __init__(self, problems: list[str], *, hint: str | None = None) -> None:
        super().__init__("\n".join(problems), hint=hint)
        self.problems = problems


class RecordError(UsageError):
    """A record on disk cannot be read: missing, damaged beyond its last line, or of an unknown schema version."""


class NewerRecord(RecordError):
    """A record of a schema version that this abharness does not know; nothing is wrong with it."""


class TraceError(UsageError):
    """Nothing can be read of a profiler's trace: no such file, no trace, or of a form that is not understood."""


class InstallError(AbharnessError):
    """A managed server environment or model could not be made."""

    exit_code = 4


class ReplayError(AbharnessError):
    """A replay could not be carried out: its process failed, or what it was told to replay cannot be."""

    exit_code = 4


class LaunchError(AbharnessError):
    """One server launch failed.

    Attributes:
        log_tail: The last lines of the server's log, if there are any.
    """

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str | None = None,
        log_tail: list[str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.log_tail = log_tail or []


class PreflightError(LaunchError):
    """The machine is not in a state to start a server: port taken, GPU busy, disk full, no model, no vLLM."""


class ServerDied(LaunchError):
    """The server process ended before it was asked to."""


class ServerNotReady(LaunchError):
    """The server gave no completion within `ready_timeout_s`."""


class WrongServer(LaunchError):
    """The socket that answers is not held by the process tree of this launch."""


class VerificationFailed(LaunchError):
    """A declared switch is not what the running processes show."""


class LoadFailed(LaunchError):
    """The load phase could not be carried out."""


class ProfilerFailed(LoadFailed):
    """The server's profiler was not started or stopped."""


class GpuError(LaunchError):
    """NVML does not answer for a GPU that it knows."""


class GpuLost(GpuError):
    """The driver has lost a GPU; only a reset or a reboot brings it back."""


class TeardownError(LaunchError):
    """Processes, port or GPU memory of a launch were not given back in time."""
