"""Lies about the switch: it is not what, where or when it was declared; the variants are the same; plugins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.lies.battery import CANDIDATE, Lie, Setup, merged


def env(**values: str | None) -> dict[str, Any]:
    """A spec's part: variables of both variants."""
    return {"server": {"env": values}}


def variants(baseline: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    """A spec's part: what each variant adds."""
    return {"variants": {"baseline": baseline, "candidate": candidate}}


def wrapper(body: str) -> str:
    """An interpreter that somebody wrote around the real one; `body` comes before it serves."""
    return f'#!/bin/sh\ncase " $* " in *" serve "*) ;; *) exec @PYTHON@ "$@" ;; esac\n{body}\nexec @PYTHON@ "$@"\n'


WRAPPED = Setup(spec={"server": {"python": "@TMP@/bin/python"}}, files={"bin/python": wrapper("")})


def wrapped(body: str) -> Setup:
    return Setup(files={"bin/python": wrapper(body)})


def faults(**orders: Any) -> Setup:
    return Setup(faults=orders)


def in_candidate(argument: Any = True, **order: Any) -> dict[str, Any]:
    return {"when": CANDIDATE, **(order or {"arg": argument})}


WRAPPERS = (
    Lie(
        "a wrapper renames the switch by a typo",
        "the switch makes no difference",
        4,
        "env_mismatch",
        r"FAKE_SWITCH: expected 'fast'; .*was started without it",
        WRAPPED,
        wrapped('[ -n "$FAKE_SWITCH" ] && exec env -u FAKE_SWITCH FAKE_SWTCH=fast @PYTHON@ "$@"'),
    ),
    Lie(
        "a wrapper unsets the switch",
        "the switch makes no difference",
        4,
        "env_mismatch",
        r"FAKE_SWITCH: expected 'fast'; .*was started without it",
        WRAPPED,
        wrapped("unset FAKE_SWITCH"),
    ),
    Lie(
        "a wrapper sets the switch in the baseline too",
        "the switch makes no difference",
        4,
        "env_mismatch",
        r"FAKE_SWITCH: expected unset; .*was started with 'fast'",
        WRAPPED,
        wrapped("export FAKE_SWITCH=fast"),
    ),
    Lie(
        "a wrapper gives the switch another spelling of the value",
        "the switch makes no difference",
        4,
        "env_mismatch",
        r"FAKE_SWITCH: expected 'fast'; .*was started with 'Fast'",
        WRAPPED,
        wrapped('[ -n "$FAKE_SWITCH" ] && export FAKE_SWITCH=Fast'),
    ),
)

PROCESSES = (
    Lie(
        "the engine is spawned without the switch",
        "the switch makes no difference: the API server has it",
        4,
        "env_mismatch",
        r"the processes disagree",
        lie=faults(child_env=in_candidate(FAKE_SWITCH=None)),
    ),
    Lie(
        "one worker of two has another value",
        "the whole model ran with the switch",
        4,
        "env_mismatch",
        r"\(Worker\) was started with 'slow'; the processes disagree",
        Setup(spec=env(FAKE_WORKERS="2")),
        faults(worker_env=in_candidate(FAKE_SWITCH="slow")),
    ),
    Lie(
        "the engine changes the switch after it started",
        "the engine ran with the value it was started with",
        4,
        "env_mismatch",
        r"FAKE_SWITCH",
        lie=faults(late_environ=in_candidate(FAKE_SWITCH="slow")),
    ),
    Lie(
        "the engine changes the switch after its plugins were loaded",
        "the engine ran with the value it was started with",
        4,
        "env_mismatch",
        r"FAKE_SWITCH",
        lie=faults(later_environ=in_candidate(FAKE_SWITCH="slow")),
    ),
    Lie(
        "the engine sets a switch that must be unset",
        "the baseline ran without the switch",
        4,
        "env_mismatch",
        r"FAKE_SWITCH",
        lie=faults(late_environ={"when": {"FAKE_SWITCH": None}, "FAKE_SWITCH": "fast"}),
    ),
)

WIPED = tuple(
    Lie(
        f"the engine's environment block is wiped: {how}",
        "the switch was on",
        4,
        "env_unverifiable",
        r"nothing can be said of .*FAKE_SWITCH",
        lie=faults(wipe_environ=in_candidate(how)),
    )
    for how in ("all", "prefix", "middle", "tail", "title")
) + tuple(
    Lie(
        f"the block is wiped where the switch must be unset: {how}",
        "the switch was off: it is not in the block",
        4,
        "env_unverifiable",
        r"nothing can be said of .*FAKE_SWITCH",
        lie=faults(wipe_environ={"when": {"FAKE_SWITCH": None}, "arg": how}),
    )
    for how in ("all", "prefix", "tail")
)

KNOWN = Setup(
    spec=variants({"env": {"FAKE_SWITCH": None, "VLLM_FAKE_SWITCH": None}},
                  {"env": {"FAKE_SWITCH": None, "VLLM_FAKE_SWITCH": "fast"}})
)  # fmt: skip
LOGGED = Setup(spec={"verify": {"expect_log": {"candidate": ["fake kernels: FAKE_SWITCH=fast"]}}})
FLAGS = variants({"env": {"FAKE_SWITCH": "0"}}, {"env": {"FAKE_SWITCH": "1"}})
FLAGS_LOGGED = Setup(
    spec={**FLAGS, "verify": {"expect_log": {"baseline": ["FAKE_SWITCH=0"], "candidate": ["FAKE_SWITCH=1"]}}}
)
KNOWN_FLAGS = Setup(
    spec=variants({"env": {"FAKE_SWITCH": None, "VLLM_FAKE_SWITCH": "0"}},
                  {"env": {"FAKE_SWITCH": None, "VLLM_FAKE_SWITCH": "1"}})
)  # fmt: skip
TRUTHINESS = Setup(spec=env(FAKE_READS="truthiness"))

NOT_READ = (
    Lie(
        "the server does not know the variable",
        "the switch makes no difference",
        4,
        "switch_not_recognised",
        r"VLLM_FAKE_SWICH was delivered and not recognised",
        KNOWN,
        Setup(spec=variants({"env": {"VLLM_FAKE_SWICH": None}}, {"env": {"VLLM_FAKE_SWICH": "fast"}})),
    ),
    Lie(
        "the engine does not read the switch",
        "the switch makes no difference",
        4,
        "switch_not_recognised",
        r"no line of the server's log.* matches the expected",
        LOGGED,
        Setup(spec=env(FAKE_READS="nothing")),
    ),
    Lie(
        "0 and 1 are both read as on, and nothing was asked to prove otherwise",
        "the switch makes no difference",
        3,
        "truthiness_risk",
        r"^truthiness_risk: .*FAKE_SWITCH differs only as",
        FLAGS_LOGGED,
        TRUTHINESS.over(Setup(spec={"verify": {"expect_log": {"baseline": [], "candidate": []}}})),
    ),
    Lie(
        "0 and 1 are both read as on, and the log shows it",
        "the switch makes no difference",
        4,
        "switch_not_recognised",
        r"no line of the server's log.* matches the expected 'FAKE_SWITCH=0'",
        FLAGS_LOGGED,
        TRUTHINESS,
    ),
    Lie(
        "0 and 1 are both read as on, and the server's own account shows it",
        "the switch makes no difference",
        3,
        "truthiness_risk",
        r"^truthiness_risk: .*VLLM_FAKE_SWITCH differs only as",
        KNOWN_FLAGS,
        TRUTHINESS,
    ),
)


def environment(name: str, site: str) -> tuple[dict[str, str], dict[str, str]]:
    """Files and links of a virtual environment of this name that has what is in a folder."""
    base = Path(sys.base_prefix) / "bin" / "python3"
    packages = f"{name}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    files = {f"{name}/pyvenv.cfg": f"home = {base.parent}\n", f"{packages}/build.pth": f"{site}\n"}
    return files, {f"{name}/bin/python": str(base)}


ONE, TWO = environment("one", "@SITE@"), environment("two", "@TMP@/newer")
TWO_BUILDS = Setup(
    spec=merged(
        env(PYTHONPATH="@TMP@/nothing", FAKE_SWITCH=None),
        variants({"env": {"FAKE_SWITCH": None}, "python": "@TMP@/one"},
                 {"env": {"FAKE_SWITCH": None}, "python": "@TMP@/two"}),
    ),
    files={
        **ONE[0], **TWO[0],
        "newer/vllm-0.33.0+fake.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+fake\n",
    },
    links={**ONE[1], **TWO[1], "newer/vllm": "@SITE@/vllm"},
)  # fmt: skip

SAME = (
    Lie(
        "the variants are the same in the spec",
        "the switch makes no difference",
        2,
        None,
        r"variants",
        lie=Setup(spec=variants({"env": {"FAKE_SWITCH": "fast"}}, {"env": {"FAKE_SWITCH": "fast"}})),
    ),
    Lie(
        "the variants become the same by --set",
        "the switch makes no difference",
        2,
        None,
        r"variants",
        lie=Setup(arguments=("--set", "variants.candidate.env.FAKE_SWITCH=null")),
    ),
    Lie(
        "the arguments differ and mean the same",
        "the argument makes no difference",
        2,
        None,
        r"the two variants do not differ",
        Setup(spec=variants({"env": {"FAKE_SWITCH": None}, "serve_args": ["--max-num-seqs", "16"]},
                            {"env": {"FAKE_SWITCH": None}, "serve_args": ["--max-num-seqs", "8"]})),
        Setup(spec=variants({}, {"serve_args": ["--max-num-seqs=16"]})),
    ),
    Lie(
        "an argument repeats the default",
        "the argument makes no difference",
        3,
        "switch_not_recognised",
        r"^switch_not_recognised: .*argument",
        Setup(spec=variants({"env": {"FAKE_SWITCH": None}},
                            {"env": {"FAKE_SWITCH": None}, "serve_args": ["--max-num-seqs", "8"]})),
        Setup(spec=variants({}, {"serve_args": ["--max-num-seqs", "256"]})),
    ),
    Lie(
        "the two interpreters are one, through a symbolic link",
        "the other build makes no difference",
        3,
        "switch_not_recognised",
        r"the two interpreters bring the same vLLM",
        TWO_BUILDS,
        Setup(spec=variants({}, {"python": "@TMP@/again"}), links={"again": "@TMP@/one"}),
    ),
)  # fmt: skip

GOOD = "def register(): pass"
PLUGIN_INFO = {
    "site/my_kernels-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.0\n",
    "site/my_kernels-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\nmy_kernels = my_kernels:register\n",
}
PLUGIN = Setup(
    spec={
        **env(PYTHONPATH="@TMP@/site:@SITE@", VLLM_LOGGING_LEVEL="DEBUG", VLLM_PLUGINS="my_kernels", FAKE_WORKERS="2"),
        "verify": {"plugins": {"baseline": ["my_kernels"], "candidate": ["my_kernels"]}},
    },
    files={**PLUGIN_INFO, "site/my_kernels.py": GOOD},
)


def plugin_lie(name: str, says: str, lie: Setup) -> Lie:
    return Lie(name, "the plugin's kernels make no difference", 4, "plugin_not_active", says, PLUGIN, lie)


PLUGINS = (
    plugin_lie(
        "a plugin is loaded in the API server only",
        r"seen loaded in .*\(APIServer\).* not in .*\(EngineCore\)",
        faults(plugin_api_server_only=in_candidate(["my_kernels"]), plugin_not_in_worker=in_candidate()),
    ),
    plugin_lie(
        "a plugin is not loaded in one worker of two",
        r"seen loaded in .*\(Worker\).*, not in pid \d+ \(Worker\)",
        faults(plugin_not_in_worker=in_candidate()),
    ),
    plugin_lie(
        "a plugin fails on import",
        r"Failed to load plugin my_kernels",
        Setup(files={"site/my_kernels.py": "import no_such_module"}),
    ),
    plugin_lie(
        "a plugin fails when it is called",
        r"Failed to load plugin my_kernels",
        Setup(files={"site/my_kernels.py": "def register():\n    raise RuntimeError('no such GPU')\n"}),
    ),
    plugin_lie(
        "a plugin is not named in VLLM_PLUGINS",
        r"seen loaded in no process",
        Setup(spec=env(VLLM_PLUGINS="my_kernel")),
    ),
    plugin_lie(
        "a plugin is installed elsewhere",
        r"seen loaded in no process",
        Setup(spec=env(PYTHONPATH="@SITE@")),
    ),
)

LIES = (*WRAPPERS, *PROCESSES, *WIPED, *NOT_READ, *SAME, *PLUGINS)
