"""Hosts on one machine, for tests, with their own processes, addresses, names and folders.

They are namespaces of Linux, and one process per host holds them: when it ends, the kernel ends
all that runs in the host, and removes the network. Nothing outside is touched: the switch that
connects the hosts has its own namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

PROJECT = Path(__file__).parents[2]
START_SECONDS = 20.0
END_SECONDS = 10.0
NAMESPACES = ["--net", "--pid", "--mount", "--uts", "--ipc"]

# The host ends with this process. It is bash, which reaps orphans: Ray takes a zombie for alive.
_FIRST_PROCESS = """
set -e
mount -t tmpfs -o size=1g tmpfs /dev/shm
exec {own}<"$BASE/$NAME"
kept=() opened=()
for path in $SEEN; do exec {number}<"$path"; kept+=("$path") opened+=("$number"); done
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir "$BASE"
mount --no-canonicalize --bind "/proc/self/fd/$own" "$BASE"
for i in "${!kept[@]}"; do
    mkdir -p "${kept[i]}"
    mount --no-canonicalize --bind "/proc/self/fd/${opened[i]}" "${kept[i]}"
done
mount --bind "$BASE/hosts" /etc/hosts
# A machine without name servers may have no such file.
mount --bind "$BASE/resolv.conf" /etc/resolv.conf || true
hostname "$NAME"
ip link set lo up
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
echo ready
while :; do sleep 1000 & wait $!; done
"""


@dataclass
class Host:
    """One host. Programs see its folder under `base`, where those outside find it as `folder`."""

    name: str
    address: str
    base: Path
    first: subprocess.Popen[str]
    pid: int  # of its first process, seen outside
    environment: dict[str, str]
    interface: str = "fabric0"
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.base / self.name

    def start(
        self, *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program in the host. What it prints is kept in pipes."""
        process = subprocess.Popen(
            self._within(command, cwd),
            env=self.environment | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 180.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the host, with a file as output, which what it leaves may keep open."""
        with tempfile.TemporaryFile("w+", errors="replace") as out:
            done = subprocess.run(
                self._within(command, cwd),
                env=self.environment | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
            )
            out.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, out.read())

    def ok(self, *command: str | Path, **options: Any) -> str:
        done = self.run(*command, **options)
        assert done.returncode == 0, (
            f"{self.name}: {' '.join(map(str, command))} ended with {done.returncode}\n"
            f"{done.stdout}"
        )
        return str(done.stdout)

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Signal what `start` has started: the child of nsenter, not nsenter itself."""
        for child in _children(process.pid):
            os.kill(child, number)

    def processes(self, containing: str) -> list[int]:
        """Processes of the host whose command line has this text, by their ids outside."""
        namespace = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "ns/pid").readlink() == namespace and containing in (
                        entry / "cmdline"
                    ).read_text(errors="replace"):
                        found.append(int(entry.name))
                except OSError:  # it has ended meanwhile
                    continue
        return found

    def end(self) -> None:
        for pid in _children(self.first.pid):
            os.kill(pid, 9)
        self.first.kill()
        self.first.communicate(timeout=END_SECONDS)
        for process in self.started:
            process.communicate(timeout=END_SECONDS)

    def _within(self, command: Sequence[str | Path], cwd: Path | None) -> list[str]:
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES, "--"]
        # nsenter's own option for a folder means the folder outside.
        return [*enter, "env", f"--chdir={cwd or self.base}", *map(str, command)]


@dataclass
class Network:
    """Hosts `10.77.0.N` on one switch, each with its own /tmp.

    The first one also sees the folders `seen_by_first` of this machine's /tmp.
    """

    names: Sequence[str]
    seen_by_first: Sequence[Path] = ()
    hosts: list[Host] = field(default_factory=list)
    # Short, for the paths of Ray's sockets.
    base: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp")))

    def __enter__(self) -> Network:
        try:
            self._switch = _hold(
                ["--net"],
                "ip link add switch0 type bridge && ip link set switch0 up && echo ready; read",
                {},
            )
            self._switch_pid = self._switch.pid
            for number, name in enumerate(self.names, 1):
                self.hosts.append(
                    self._add(
                        name, f"10.77.0.{number}", seen=self.seen_by_first if number == 1 else []
                    )
                )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in self.hosts:
            host.end()
        if hasattr(self, "_switch"):
            self._switch.kill()
            self._switch.communicate(timeout=END_SECONDS)
        shutil.rmtree(self.base, ignore_errors=True)

    def cut(self, host: Host) -> None:
        """Unplug the host from the switch: packets are lost, and no connection closes."""
        self._on_switch("ip", "link", "set", f"to-{host.name}", "down")

    def mend(self, host: Host) -> None:
        self._on_switch("ip", "link", "set", f"to-{host.name}", "up")

    def _add(self, name: str, address: str, *, seen: Sequence[Path]) -> Host:
        folder = self.base / name
        folder.mkdir(mode=0o700)
        # As Debian writes it: a host's own name means loopback to itself.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        (folder / "resolv.conf").write_text("")
        programs = {
            path
            for path in (PROJECT, Path(sys.prefix), Path(sys.base_prefix))
            if path.is_relative_to("/tmp")
        }
        first = _hold(
            [*NAMESPACES, "--fork", "--kill-child", "--mount-proc"],
            _FIRST_PROCESS,
            {"BASE": str(self.base), "NAME": name, "SEEN": " ".join(map(str, [*programs, *seen]))},
        )
        (pid,) = _children(first.pid)
        host = Host(
            name=name,
            address=address,
            base=self.base,
            first=first,
            pid=pid,
            environment=self._environment(),
        )
        plug = f"to-{name}"
        peer = ["peer", "name", host.interface, "netns", str(pid)]
        self._on_switch("ip", "link", "add", plug, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", plug, "master", "switch0", "up")
        host.ok("ip", "addr", "add", f"{address}/24", "dev", host.interface)
        host.ok("ip", "link", "set", host.interface, "up")
        return host

    def _environment(self) -> dict[str, str]:
        dropped = ("RAY_", "SWEEP_", "PG", "TMPDIR", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        base = str(self.base)
        own = {"HOME": base, "TMPDIR": base, "PYTHONPATH": str(PROJECT), "NO_COLOR": "1"}
        return kept | own

    def _on_switch(self, *command: str) -> None:
        subprocess.run(
            ["nsenter", f"--target={self._switch_pid}", "--net", "--", *command],
            check=True,
            capture_output=True,
            text=True,
        )


def _hold(
    namespaces: Sequence[str], script: str, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a process that holds new namespaces until it or the test ends."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", script]
    process = subprocess.Popen(
        command,
        env=dict(os.environ) | dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise OSError(f"no namespaces {' '.join(namespaces)}: {process.communicate()[1].strip()}")
    return process


def _children(pid: int) -> list[int]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return [int(child) for child in found]
        time.sleep(0.01)
    return []
