"""The templates in deploy/: schemas, syntax, and every command that they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from docs.generate import documents
from orchestrator.cli import app
from orchestrator.core.search.planner import plan_cell
from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.trial.protocol import Device
from tests.multi_host.hosts import PROJECT

DEPLOY = PROJECT / "deploy"
BIN = Path(sys.executable).parent
RAY_CLUSTERS = (DEPLOY / "local/cluster.yaml", DEPLOY / "cloud/cluster.yaml")
SBATCH = DEPLOY / "slurm/sweep.sbatch"
RAY_JOB = DEPLOY / "kuberay/rayjob.yaml"
IMAGE = DEPLOY / "kuberay/Dockerfile"
_CALL = re.compile(
    r"(?:^|[\s'\"(;&|])"
    r"(sweep (?:run|cancel|validate|status|best|doctor|plan|show|logs|sql|export)\b[^|;&)#\n]*)",
    re.MULTILINE,
)
_SHELL_VARIABLE = re.compile(r"\$\{?[A-Za-z_@][A-Za-z_]*\}?")


def lines_of_documents() -> Iterator[str]:
    """Return the commands for people, line by line; a backslash at the end continues a line."""
    for document in documents():
        for block in re.findall(
            r"^```console\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE
        ):
            yield from re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Return the calls of `sweep` in lines of shell, with variables and TRIAL filled in."""
    for found in _CALL.finditer(text):
        words = shlex.split(found[1].split("'")[0].split(" > ")[0])
        yield [
            _SHELL_VARIABLE.sub("x", word).replace("TRIAL", "7")
            for word in words[1:]
            if word != "..."
        ]


def calls_in(template: Path) -> list[list[str]]:
    return list(commands(template.read_text().replace("\\\n", " ")))


def mistake_in(words: Sequence[str]) -> str | None:
    """What the program would say against a call; None if it would take it. Runs nothing."""
    group: Any = typer.main.get_command(app)
    try:
        group.commands[words[0]].make_context(words[0], list(words[1:]))
    except (KeyError, typer.TyperException) as exc:
        return f"{words}: {exc}"
    return None


def documents_of(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", RAY_CLUSTERS, ids=lambda path: path.parent.name)
def test_a_ray_cluster_holds_against_the_schema_that_ray_checks(path: Path) -> None:
    import ray
    from ray.autoscaler._private.util import prepare_config, validate_config

    (config,) = documents_of(path)
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(config)] == []
    validate_config(prepare_config(config))


@pytest.mark.parametrize("path", RAY_CLUSTERS, ids=lambda path: path.parent.name)
def test_a_ray_cluster_has_a_token_and_its_dashboard_stays_on_loopback(path: Path) -> None:
    (config,) = documents_of(path)
    starts = [
        command
        for name in ("head", "worker")
        for command in config[f"{name}_start_ray_commands"]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all("export RAY_AUTH_MODE=token" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert "~/.ray/auth_token" in config["file_mounts"]
    for command in starts:
        assert flags(command.partition("ray start")[2]) <= known_flags("start")


@pytest.mark.parametrize(("num_failures", "code"), [(0, 0), (2, 0), (3, 1)])
def test_a_worker_joins_though_its_first_starts_failed(
    tmp_path: Path, num_failures: int, code: int
) -> None:
    """Ray's autoscaler never tries a machine of fixed addresses again that has failed once."""
    (config,) = documents_of(RAY_CLUSTERS[0])
    *_, start = config["worker_start_ray_commands"]
    programs = {
        "ip": "echo 10.0.0.1 dev eth0 src 10.0.0.2 uid 0",
        "sleep": "",
        "ray": f'echo "$*" >> {tmp_path}/calls; [ $1 = stop ] ||'
        f" [ $(grep -c ^start {tmp_path}/calls) -gt {num_failures} ]",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    done = subprocess.run(
        ["bash", "-c", start.replace("ulimit -n 65536;", "")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_HEAD_IP": "10.0.0.1"},
        check=False,
    )
    assert done.returncode == code
    join = "start --address=10.0.0.1:6379 --node-ip-address=10.0.0.2"
    again = ["stop --force", join] * min(num_failures, 2)
    assert (tmp_path / "calls").read_text().splitlines() == [join, *again]


def test_the_autoscaled_nodes_are_those_that_the_documents_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (config,) = documents_of(RAY_CLUSTERS[1])
    p5 = config["available_node_types"]["p5"]
    assert (p5["min_workers"], p5["max_workers"]) == (0, config["max_workers"])
    assert p5["resources"]["GPU"] == 8
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}


def test_the_batch_script_is_valid_shell() -> None:
    for checker in (["bash", "-n", SBATCH], [BIN / "shellcheck", SBATCH, PROJECT / ".ci/run"]):
        assert subprocess.run(checker, check=False).returncode == 0


def test_the_batch_script_asks_for_what_ray_and_the_sweep_need() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SBATCH.read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"  # symmetric-run starts one Ray per node
    assert "exclusive" in asked  # and ends with `ray stop`
    assert asked["wait-all-nodes"] == "1"
    assert asked["signal"] == "B:USR1@900"  # to the script, not to Ray
    assert "--kill-on-bad-exit=0" in SBATCH.read_text()


def test_the_options_of_symmetric_run_exist() -> None:
    call = re.search(r"ray symmetric-run (.*?) -- ", SBATCH.read_text())
    assert call is not None
    assert flags(call[1]) == {"--address", "--min-nodes"}
    assert flags(call[1]) <= known_flags("symmetric-run")


def test_the_job_on_kubernetes_is_queued_and_takes_its_secrets_by_reference() -> None:
    config_map, job = documents_of(RAY_JOB)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True  # Kueue admits no other
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    head, worker = containers(job)
    store = next(variable for variable in head["env"] if variable["name"] == "SWEEP_DB")
    assert set(store["valueFrom"]["secretKeyRef"]) == {"name", "key"}
    assert "SWEEP_DB" not in [variable["name"] for variable in worker["env"]]
    assert homes(head) == homes(worker) == ["/sweep-home"]
    assert "/sweep-home" in mounts(head) and "/sweep-home" in mounts(worker)
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert f"{mounts(head)[0]}/{next(iter(config_map['data']))}" in spec["entrypoint"]


def test_the_sweep_on_kubernetes_fits_the_nodes_that_it_asks_for() -> None:
    config_map, job = documents_of(RAY_JOB)
    ((name, text),) = config_map["data"].items()
    spec = load(text, source=name)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    _, worker = containers(job)
    per_node = int(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert spec.gpus_per_node == per_node
    assert max(spec.gpus) == per_node * workers["replicas"]
    for cell in spec.cells():
        assert (
            len(
                plan_cell(
                    spec, cell, hardware=None, gpus_per_node=per_node, device=Device.CPU
                ).candidates
            )
            > 0
        ), cell.key


def test_the_image_on_kubernetes_is_the_one_that_the_documents_build_with_every_package_in_it() -> (
    None
):
    _, job = documents_of(RAY_JOB)
    (image,) = {container["image"] for container in containers(job)}
    shown = [line for line in lines_of_documents() if line.startswith("docker ")]
    assert [line.split()[-2 if line.split()[-1] == "." else -1] for line in shown] == [image, image]
    assert f"--file {IMAGE.relative_to(PROJECT)} " in shown[0]
    copied = {
        word
        for line in re.findall(r"^COPY (.*)$", IMAGE.read_text(), re.MULTILINE)
        for word in line.split()[:-1]
    }
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    packages = {
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert copied == packages | {"pyproject.toml", "constraints.txt", project["project"]["readme"]}
    assert (
        f"ray=={job['spec']['rayClusterSpec']['rayVersion']}"
        in (PROJECT / "constraints.txt").read_text().splitlines()
    )


def containers(job: Any) -> list[Any]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def homes(container: Any) -> list[str]:
    return [variable["value"] for variable in container["env"] if variable["name"] == "SWEEP_HOME"]


def mounts(container: Any) -> list[str]:
    return [mount["mountPath"] for mount in container["volumeMounts"]]


def flags(command: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", command.partition("$(")[0]))


def known_flags(command: str) -> set[str]:
    from ray.scripts.scripts import cli

    return {option for parameter in cli.commands[command].params for option in parameter.opts}


@pytest.mark.parametrize(
    "path",
    sorted(path for path in DEPLOY.rglob("*") if path.is_file()),
    ids=lambda path: str(path.relative_to(DEPLOY)),
)
def test_every_call_of_sweep_in_a_template_is_one_that_the_program_takes(path: Path) -> None:
    assert [mistake for words in calls_in(path) if (mistake := mistake_in(words))] == []


def test_the_templates_have_calls_of_sweep_to_be_parsed() -> None:
    """Otherwise the pattern would pass all templates by finding no command."""
    found = {
        path: {words[0] for words in calls_in(path)} for path in DEPLOY.rglob("*") if path.is_file()
    }
    assert {path for path, called in found.items() if "run" in called} == {SBATCH, RAY_JOB}
    assert {"validate", "cancel"} <= found[SBATCH]


def test_every_command_of_sweep_that_a_person_is_shown_is_one_that_the_program_takes() -> None:
    shown = [words for line in lines_of_documents() for words in commands(line)]
    assert len(shown) > 10
    assert [mistake for words in shown if (mistake := mistake_in(words))] == []


def test_a_command_that_the_program_does_not_take_is_found() -> None:
    (words,) = commands("sweep run mine.yaml --no-such-option")
    assert "no-such-option" in (mistake_in(words) or "")


def test_the_batch_script_and_the_documents_name_programs_of_this_project_only() -> None:
    for name in re.findall(
        r"deploy/[\w./-]+\.\w+", "".join(path.read_text() for path in documents())
    ):
        assert (PROJECT / name).exists(), name
    assert shutil.which("bash")
