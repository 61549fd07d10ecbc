"""`ray up`, `ray submit` and `ray down` over ssh, with the template of deploy/local.

Two hosts have an sshd on port 22. The second one joins once the head's monitor has reached it,
which a sweep can wait for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.acceptance.command import write_sweep
from tests.multi_host.conftest import need
from tests.multi_host.hosts import PROJECT, Host, Network
from tests.multi_host.ray_hosts import BIN, RAY

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.timeout(900)]

TEMPLATE = PROJECT / "deploy/local/cluster.yaml"
DRIVER = PROJECT / "deploy/local/sweep_on_cluster.py"
SMALL = "--num-cpus=1 --object-store-memory=80000000 --disable-usage-stats"
STEP_SECONDS = 300.0
OF_OURS = ("orchestrator.node.rank_server", "NodeAgent")
_USERS = "root:x:0:0:root:{home}:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
_PASSWORDS = "root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n"
_LOG = "sshd.log"
_SSHD = """HostKey {home}/.ssh/host_key
PidFile none
UsePAM no
PasswordAuthentication no
LogLevel VERBOSE
AuthorizedKeysFile {home}/.ssh/authorized_keys
"""


@dataclass
class Told:
    """What was seen on the way."""

    submitted: str
    attempts: Any
    best: Any
    token_mode: str
    left: dict[str, list[int]]


@pytest.fixture(scope="module")
def told(namespaces: None) -> Iterator[Told]:
    need({"sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync"})
    with Network(["head", "worker"]) as network:
        head, worker = network.hosts
        _let_in(head, worker)
        _write(head, worker)
        sent = ["mine.yaml", f"{head.base}/sent.yaml"]
        run = ["run", "sent.yaml", "--wait-for-nodes", "4min"]
        with _logs_shown(head):
            head.ok(RAY, "up", "--yes", "--no-config-cache", "cluster.yaml", timeout=STEP_SECONDS)
            head.ok(RAY, "rsync-up", "cluster.yaml", *sent, timeout=STEP_SECONDS)
            submitted = head.ok(
                RAY, "submit", "cluster.yaml", DRIVER, "--", *run, timeout=STEP_SECONDS
            )
        best = head.ok(RAY, "exec", "cluster.yaml", "sweep best --json", timeout=STEP_SECONDS)
        attempts = json.loads(head.ok(BIN / "sweep", "show", "1", "--json"))["attempts"]
        mode = worker.ok("stat", "--format=%a", worker.base / ".ray/auth_token")
        head.ok(RAY, "down", "--yes", "cluster.yaml", timeout=STEP_SECONDS)
        left = {
            host.name: [pid for text in OF_OURS for pid in host.processes(text)]
            for host in network.hosts
        }
        # With this provider `ray down` reaches only the head. A worker's Ray ends by itself within
        # a minute.
        left["head"] += head.processes("raylet") + head.processes("gcs_server")
        yield Told(
            submitted=submitted,
            attempts=attempts,
            best=_document(best),
            token_mode=mode.strip(),
            left=left,
        )


def test_a_submitted_script_measures_on_every_machine_of_the_cluster(told: Told) -> None:
    (attempt,) = told.attempts
    assert attempt["state"] == "measured"
    assert sorted(attempt["nodes"]) == ["head", "worker"]
    assert "Sweep mine ended" in told.submitted


def test_results_are_asked_for_over_ssh(told: Told) -> None:
    assert [row["sweep"] for row in told.best["best"]] == ["mine"]


def test_the_token_reaches_every_machine_and_only_its_user_can_read_it(told: Told) -> None:
    assert told.token_mode == "600"


def test_the_end_of_the_cluster_leaves_no_rank_and_no_ray_on_the_head(told: Told) -> None:
    assert told.left == {"head": [], "worker": []}


@contextmanager
def _logs_shown(head: Host) -> Iterator[None]:
    """Add the ends of the head's logs, its monitor's and its sshd's, to a failure."""
    try:
        yield
    except AssertionError as failed:
        for log in (*head.folder.glob("ray/session_latest/logs/monitor.*"), head.folder / _LOG):
            failed.add_note(f"{log.name} of the head ends with\n{log.read_text()[-4000:]}")
        raise


def _let_in(*hosts: Host) -> None:
    """Start an sshd on each host that accepts the first one's key, whoever owns the files."""
    first = hosts[0]
    for host in hosts:
        ssh = host.folder / ".ssh"
        ssh.mkdir(mode=0o700)
        host.ok("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host.base / ".ssh/host_key")
    first.ok("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", first.base / ".ssh/id_ed25519")
    for host in hosts:
        (host.folder / ".ssh/authorized_keys").write_text(
            (first.folder / ".ssh/id_ed25519.pub").read_text()
        )
        # All of /etc, since a mount on a file is gone as soon as anybody replaces that file: the
        # first PostgreSQL of a machine adds a user, beside this test.
        host.ok("cp", "--archive", "/etc", host.base / "etc")
        for name, text in (("passwd", _USERS), ("shadow", _PASSWORDS)):
            (host.folder / "etc" / name).write_text(text.format(home=host.base))
        host.ok("mount", "--bind", host.base / "etc", "/etc")
        (host.folder / "sshd_config").write_text(_SSHD.format(home=host.base))
        host.ok("mount", "-t", "tmpfs", "tmpfs", "/run")
        host.ok("mkdir", "/run/sshd")
        host.ok("/usr/sbin/sshd", "-f", host.base / "sshd_config", "-E", host.base / _LOG)
        # What the template's setup commands do, with the environment that is already here.
        (host.folder / ".bashrc").write_text(
            f"export PATH={BIN}:$PATH PYTHONPATH={PROJECT}"
            f" RAY_AUTH_MODE=token NO_COLOR=1 RAY_TMPDIR={host.base}\n"
        )


def _write(head: Host, worker: Host) -> None:
    """The template with addresses, user and key; it installs nothing, and Ray gets little."""
    config: Any = yaml.safe_load(TEMPLATE.read_text())
    text = json.dumps(config).replace(config["provider"]["head_ip"], head.address)
    config = json.loads(text)
    config["provider"]["worker_ips"] = [worker.address]
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(head.base / ".ssh/id_ed25519")}
    del config["file_mounts"]["~/layout-sweep"]
    config["setup_commands"] = []
    for name, more in (("head", f"{SMALL} --include-dashboard=false"), ("worker", SMALL)):
        stop, start = config[f"{name}_start_ray_commands"]
        config[f"{name}_start_ray_commands"] = [
            stop,
            start.replace("ulimit -n 65536;", "").replace("ray start", f"ray start {more}"),
        ]
    (head.folder / "cluster.yaml").write_text(json.dumps(config))
    token = head.folder / ".ray/auth_token"
    token.parent.mkdir()
    token.touch(mode=0o600)
    token.write_text("f" * 64)
    head.environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_TMPDIR": str(head.base),
        "PATH": f"{BIN}:{head.environment['PATH']}",
    }
    write_sweep(
        head.folder,
        "mine",
        gpus_per_node=1,
        axes={"micro_batch_size": [8], "recompute": ["none"], "zero_stage": [0]},
    )


def _document(said: str) -> Any:
    return json.loads(said[said.index("{") : said.rindex("}") + 1])
