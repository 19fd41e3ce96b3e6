"""The plan: order of launches, final command and environment, nothing from the caller's shell that was not declared."""

from dataclasses import replace
from pathlib import Path

import pytest

from abharness.plan import Host, build_plan, config_hash, describe, launch_order
from abharness.redaction import redact
from abharness.spec import CACHE_VARIABLES, DesignSpec, ExperimentSpec
from abharness.specload import parse_spec
from abharness.witnesses import KernelFolder

SPEC = """\
experiment: switch
server:
  model: some/model
  serve_args: [--enforce-eager]
  env: {SHARED: "1", GONE: null}
  inherit: [MINE]
variants:
  baseline: {env: {SWITCH: null}}
  candidate: {env: {SWITCH: "1"}, serve_args: [--extra, "2"]}
design: {launches_per_variant: 2}
workloads:
  - {name: decode, kind: decode, input_len: 8, output_len: 8}
"""


def spec(*overrides: str) -> ExperimentSpec:
    return parse_spec(SPEC, "x.yaml", overrides)


def host(**environ: str) -> Host:
    return Host(
        pythons={"baseline": Path("/py/bin/python"), "candidate": Path("/py/bin/python")},
        model="/models/m",
        port=4242,
        scratch=Path("/tmp/ab-x"),
        probe_site=Path("/tmp/ab-x/site"),
        run_token="tok",
        environ=environ,
    )


@pytest.mark.parametrize(
    ("order", "count", "expected"),
    [("abba", 1, "bc"), ("abba", 2, "bccb"), ("abba", 3, "bccbbc"), ("abba", 4, "bccbbccb"), ("ab", 3, "bbbccc")],
)
def test_launch_order(order: str, count: int, expected: str) -> None:
    design = DesignSpec.model_validate({"order": order, "launches_per_variant": count})
    assert "".join(variant[0] for variant in launch_order(design)) == expected


def test_random_order_is_balanced_in_pairs_and_seeded() -> None:
    orders = {
        seed: "".join(v[0] for v in launch_order(DesignSpec(order="random", launches_per_variant=8, seed=seed)))
        for seed in range(20)
    }
    again = "".join(v[0] for v in launch_order(DesignSpec(order="random", launches_per_variant=8, seed=3)))
    assert again == orders[3]
    assert len(set(orders.values())) > 10
    for order in orders.values():
        assert all(set(order[i : i + 2]) == {"b", "c"} for i in range(0, 16, 2))


def test_command_and_environment_are_final() -> None:
    baseline, candidate, *_ = build_plan(spec(), host(PATH="/bin", MINE="x")).launches
    assert candidate.argv[0] == "/py/bin/python"
    assert list(candidate.argv[3:]) == [
        "serve", "/models/m", "--host", "127.0.0.1", "--port", "4242",
        "--served-model-name", candidate.served_model_name, "--enforce-eager", "--extra", "2",
    ]  # fmt: skip
    assert candidate.env["SWITCH"] == "1"
    assert "SWITCH" not in baseline.env
    assert baseline.expected == {"SHARED": "1", "GONE": None, "SWITCH": None}
    assert candidate.env["SPT_NOENV"] == "1"
    assert next(iter(candidate.env)) == "ABHARNESS_LAUNCH"
    assert "MINE" in candidate.inherited


def test_the_probe_is_brought_into_every_launch_or_the_plan_says_why_not() -> None:
    launch = build_plan(spec(), host(PATH="/bin")).launches[0]
    assert launch.env["PYTHONPATH"] == "/tmp/ab-x/site"
    assert (launch.env["ABHARNESS_PROBE_DIR"], launch.probe_absent) == ("/tmp/ab-x/0/probe", None)
    assert "PYTHONPATH" not in launch.expected
    declared = build_plan(spec("server.env.PYTHONPATH=/mine"), host()).launches[0]
    assert declared.env["PYTHONPATH"] == declared.expected["PYTHONPATH"] == "/mine:/tmp/ab-x/site"
    inherited = build_plan(spec("server.inherit=[PYTHONPATH]"), host(PYTHONPATH="/shell")).launches[0]
    assert inherited.env["PYTHONPATH"] == "/shell:/tmp/ab-x/site"
    unset = build_plan(spec("server.env.PYTHONPATH=null"), host()).launches[0]
    assert ("PYTHONPATH" in unset.env, unset.probe_absent) == (False, "PYTHONPATH is declared as unset")
    for names, absent in (("pq2", True), ('""', True), ("pq2,abharness_probe", False)):
        plugins = build_plan(spec(f"server.env.VLLM_PLUGINS={names}"), host()).launches[0]
        assert (plugins.probe_absent is not None) == absent


def test_a10_switches_of_the_callers_shell_reach_no_variant_and_are_named() -> None:
    leaky = host(PATH="/bin", VLLM_SWITCH="1", TORCH_LOGS="x", SWITCH="1", HOME="/h", CUDA_VISIBLE_DEVICES="0")
    for launch in build_plan(spec(), leaky).launches:
        assert not {"VLLM_SWITCH", "TORCH_LOGS"} & set(launch.env)
        assert set(launch.not_passed) == {"VLLM_SWITCH", "TORCH_LOGS"}
        assert launch.env["CUDA_VISIBLE_DEVICES"] == "0"
        assert launch.env.get("SWITCH") == ("1" if launch.variant == "candidate" else None)


def test_a_declared_unset_wins_over_the_base() -> None:
    text = SPEC.replace("GONE: null", "LANG: null")
    plan = build_plan(parse_spec(text, "x.yaml"), host(LANG="C", PATH="/bin"))
    assert all("LANG" not in launch.env for launch in plan.launches)


@pytest.mark.parametrize("declared", ["/mine", None])
def test_a_declared_path_is_passed_as_it_was_declared(declared: str | None) -> None:
    text = SPEC.replace("GONE: null", f"PATH: {'null' if declared is None else declared}")
    for launch in build_plan(parse_spec(text, "x.yaml"), host(PATH="/bin")).launches:
        assert launch.env.get("PATH") == launch.expected["PATH"] == declared


def test_b1_b2_no_cache_directory_is_shared_between_any_two_launches() -> None:
    launches = build_plan(spec(), host()).launches
    paths = [launch.env[name] for launch in launches for name in CACHE_VARIABLES]
    assert len(paths) == len(set(paths)) == len(launches) * len(CACHE_VARIABLES)
    assert len({launch.env["TMPDIR"] for launch in launches}) == len(launches)


def test_every_launch_serves_under_a_name_of_its_own() -> None:
    launches = build_plan(spec(), host()).launches
    assert len({launch.served_model_name for launch in launches}) == len(launches)
    assert len({launch.env["ABHARNESS_LAUNCH"] for launch in launches}) == len(launches)


def test_the_plan_is_pure() -> None:
    assert build_plan(spec(), host()) == build_plan(spec(), host())


def test_config_hash_is_of_what_is_run() -> None:
    assert config_hash(spec()) == config_hash(spec("question=other words", "server.ready_timeout_s=5"))
    for change in (
        "server.model=m2",
        "variants.candidate.env.SWITCH=2",
        "design.seed=1",
        "workloads.decode.output_len=9",
    ):
        assert config_hash(spec(change)) != config_hash(spec())


def kernels(sha256: str, **where: str) -> KernelFolder:
    return KernelFolder(name="mine", sha256=sha256, **{"path": "/a/mine", "site": "/tmp/ab-x/kernels/1", **where})


def test_config_hash_is_of_what_the_kernels_are_not_of_where_they_lie() -> None:
    asked = spec("server.kernels=[a/mine]")
    both = {"baseline": (kernels("1"),), "candidate": (kernels("1"),)}
    elsewhere = {variant: (kernels("1", path="/b/mine", site="/tmp/ab-y"),) for variant in both}
    assert config_hash(asked, both) == config_hash(spec("server.kernels=[b/mine]"), elsewhere)
    assert config_hash(asked, both) != config_hash(asked, {**both, "candidate": (kernels("2"),)})
    assert config_hash(asked, both) != config_hash(asked, {**both, "candidate": ()})


def test_runs_from_before_there_were_kernel_folders_can_be_resumed() -> None:
    assert config_hash(spec(), {"baseline": (), "candidate": ()}) == config_hash(spec()) == "6f4f740695df"


def test_both_variants_have_a_folder_for_kernels_where_one_has_kernels() -> None:
    sites = {"baseline": Path("/tmp/ab-x/kernels/0"), "candidate": Path("/tmp/ab-x/kernels/1")}
    with_kernels = replace(host(), kernels={"baseline": (), "candidate": (kernels("1"),)}, kernel_sites=sites)
    baseline, candidate, *_ = build_plan(spec("server.env.PYTHONPATH=/mine"), with_kernels).launches
    assert baseline.env["PYTHONPATH"] == "/mine:/tmp/ab-x/kernels/0:/tmp/ab-x/site"
    assert candidate.env["PYTHONPATH"] == candidate.expected["PYTHONPATH"] == "/mine:/tmp/ab-x/kernels/1:/tmp/ab-x/site"


def test_secrets_are_redacted_and_switches_are_not() -> None:
    env = {"HF_TOKEN": "s3cret", "MY_API_KEY": "s3cret", "TOKENIZERS_PARALLELISM": "false", "VLLM_KEYBOARD": "1",
           "HTTPS_PROXY": "http://me:s3cret@proxy:80/"}  # fmt: skip
    shown = redact(env)
    assert "s3cret" not in str(shown)
    assert shown["TOKENIZERS_PARALLELISM"] == "false"
    assert "proxy:80" in shown["HTTPS_PROXY"]
    plan = build_plan(spec(), host(HF_TOKEN="s3cret", PATH="/bin"))
    assert plan.launches[0].env["HF_TOKEN"] == "s3cret"
    assert "s3cret" not in describe(spec(), plan)


def test_the_description_holds_every_command_and_variable() -> None:
    plan = build_plan(spec(), host(VLLM_LEAK="1"))
    text = describe(spec(), plan)
    assert "baseline candidate candidate baseline" in text
    for launch in plan.launches:
        assert " ".join(launch.argv) in text
        assert all(f"{name}={value}" in text for name, value in launch.env.items())
    assert 'SWITCH   baseline: (must be unset)   candidate: "1"' in text
    assert "VLLM_LEAK" in text
