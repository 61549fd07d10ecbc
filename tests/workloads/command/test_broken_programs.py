"""Ways to break a program: each ends in one true sentence, and leaves no process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import tree_of
from tests.workloads.command.programs import judge, left_of, order_of

K = FailureKind
HANGS = {"first_step": 2.0, "steady": 2.0, "teardown": 2.0}


@dataclass(frozen=True)
class Broken:
    """What the program does, how that is judged, and what its sentence has to say."""

    program: str
    kind: FailureKind | None  # None: measured all the same
    said: tuple[str, ...] = ()
    known: dict[str, Any] = field(default_factory=dict)


def broken(program: str, kind: FailureKind | None, *said: str, **known: Any) -> Broken:
    return Broken(program=program, kind=kind, said=said, known=known)


STEPS = "for _ in range(9): work(0.01); tell(step_seconds=0.01 * random.uniform(0.9, 1))\n"
FEW = STEPS.replace("range(9)", "range(4)")
RESULT = 'open(os.environ["SWEEP_RESULT_FILE"], "w")'
METRICS = 'os.environ["SWEEP_METRICS_FILE"]'

PROGRAMS = {
    # It does not start.
    "a module is missing": broken(
        "import no_such_module", K.USER_ERROR, "ModuleNotFoundError", "no_such_module"
    ),
    "it crashes at import": broken(
        "raise ImportError('libcudart.so.99: cannot open shared object file')",
        K.USER_ERROR,
        "ImportError: libcudart.so.99",
    ),
    "the interpreter does not exist": broken(
        "",
        K.USER_ERROR,
        "workload.options.argv[0] '/no/such/python'",
        "does not exist",
        argv=["/no/such/python"],
    ),
    "the program may not be executed": broken(
        "", K.USER_ERROR, "is not executable: chmod +x", content=b"#!/bin/sh", mode=0o644
    ),
    "the program is no program": broken(
        "",
        K.USER_ERROR,
        "cannot start",
        "Exec format error",
        content=b"\x7fELF and nothing more",
        mode=0o755,
    ),
    "the script does not exist": broken(
        "",
        K.USER_ERROR,
        "the script /no/such/train.py",
        "does not exist",
        argv=[sys.executable, "/no/such/train.py"],
    ),
    "the working folder does not exist": broken(
        "",
        K.USER_ERROR,
        "workload.options.cwd '/no/such/folder' is missing",
        options={"cwd": "/no/such/folder"},
    ),
    "its arguments are wrong": broken(
        "import argparse; argparse.ArgumentParser(prog='train').parse_args(['--mbs', '4'])",
        K.USER_ERROR,
        "unrecognized arguments: --mbs 4",
    ),
    # It tells nothing, or rubbish.
    "it ends without a word": broken("", K.BAD_RESULT, "wrote 0 steps"),
    "half of a line": broken(
        f"""open({METRICS}, "w").write('{{"step_sec')""", K.BAD_RESULT, "lines were no steps"
    ),
    "half of a document": broken(
        f"""{RESULT}.write('{{"step_seconds": [0.5, 0.')""", K.BAD_RESULT, "not valid", "EOF"
    ),
    "an empty document": broken(f"{RESULT}.close()", K.BAD_RESULT, "document is empty"),
    "a document of another shape": broken(
        f"""json.dump([0.5, 0.5], {RESULT})""", K.BAD_RESULT, "not valid"
    ),
    "a field that nobody knows": broken(
        f"""json.dump({{"step_seconds": [0.5], "stepseconds": 1}}, {RESULT})""",
        K.BAD_RESULT,
        "stepseconds",
    ),
    "bytes that are no text": broken(
        f"""open({METRICS}, "wb").write(os.urandom(5000) + b"\\n" + bytes(range(256)))""",
        K.BAD_RESULT,
        "lines were no steps",
    ),
    "a line of 10 MB": broken(
        f"""open({METRICS}, "w").write('x' * 10_000_000 + '\\n')""",
        K.BAD_RESULT,
        "; 1 lines were no steps, the first: xxx",
    ),
    "a document of 10 MB": broken(
        f"""{RESULT}.write('x' * 10_000_000)""", K.BAD_RESULT, "more than 1048576"
    ),
    "NaN as a step time": broken(
        'tell(step_seconds=float("nan"))', K.BAD_RESULT, "line 1: step_seconds is nan"
    ),
    "a negative step time": broken(
        STEPS + "tell(step_seconds=-0.5)",
        K.BAD_RESULT,
        "line 10: step_seconds is -0.5",
        "perf_counter",
    ),
    "a step time of zero": broken("tell(step_seconds=0)", K.BAD_RESULT, "step_seconds is 0"),
    "a huge step time": broken(
        "tell(step_seconds=1e300)", K.BAD_RESULT, "1e+300", "no step takes months"
    ),
    "a step time as text": broken(
        "tell(step_seconds='0.52 s')", K.BAD_RESULT, "'0.52 s'", "the number itself is wanted"
    ),
    "a loss that is NaN": broken(
        "tell(step_seconds=0.01, loss=float('nan')); time.sleep(60)", K.NOT_FINITE, "loss of step 1"
    ),
    # Its files.
    "its run folder is deleted": broken(
        "import shutil\n" + STEPS + "shutil.rmtree(os.environ['SWEEP_RUN_DIR'])",
        K.USER_ERROR,
        "the program removed its run directory",
    ),
    "its working folder is deleted": broken(
        "os.mkdir('a'); os.chdir('a'); os.rmdir(os.getcwd()); os.getcwd()",
        K.USER_ERROR,
        "FileNotFoundError",
    ),
    "the metrics file is a directory": broken(
        f"os.mkdir({METRICS})", K.BAD_RESULT, "program-metrics.jsonl: Is a directory"
    ),
    "the metrics file is a FIFO": broken(
        f"os.mkfifo({METRICS})", K.BAD_RESULT, "program-metrics.jsonl", "no regular file"
    ),
    "the metrics file is endless": broken(
        f"os.symlink('/dev/zero', {METRICS})", K.BAD_RESULT, "no regular file"
    ),
    "the metrics file is a link to a file": broken(
        f"os.symlink(os.path.abspath('elsewhere'), {METRICS})\n" + STEPS, None
    ),
    "the metrics file is written anew": broken(
        f"""
        for step in range(6):
            work(0.12)
            with open({METRICS}, "w") as file:
                print(json.dumps({{"step_seconds": 0.12 + step / 1000}}), file=file)
        """,
        K.BAD_RESULT,
        "was written anew",
        "append",
    ),
    "the metrics file is written anew with the same text": broken(
        f"""
        for step in range(6):
            work(0.12)
            with open({METRICS}, "w") as file:
                print(json.dumps({{"step_seconds": 0.12}}), file=file)
        """,
        K.BAD_RESULT,
        "append to it",
    ),
    "only the time of the metrics file changes, as NFS does it": broken(
        f"{FEW}\nwork(0.1); os.utime({METRICS}, (1, 1)); work(0.2)",
        None,
    ),
    "the result is a directory": broken(
        "os.mkdir(os.environ['SWEEP_RESULT_FILE'])", K.BAD_RESULT, "result.json: Is a directory"
    ),
    "the result is a FIFO": broken(
        "os.mkfifo(os.environ['SWEEP_RESULT_FILE'])", K.BAD_RESULT, "no regular file"
    ),
    "it may not write": broken(
        f"""
        if os.getuid() == 0:
            os.chmod(os.environ["SWEEP_RUN_DIR"], 0o755); os.setuid(65534)
        else:
            os.chmod(os.environ["SWEEP_RUN_DIR"], 0o500)
        open({METRICS} + "2", "w")
        """,
        K.USER_ERROR,
        "PermissionError",
    ),
    "the disk is full": broken(
        "file = open('/dev/full', 'w'); file.write('x'); file.flush()", K.STORAGE, "No space left"
    ),
    # Its limits.
    "its files may not grow": broken(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        open("checkpoint", "wb").write(bytes(10_000))
        """,
        K.USER_ERROR,
        "File too large",
    ),
    "it dies of a file that may not grow": broken(
        """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        open("checkpoint", "wb").write(bytes(10_000))
        """,
        K.USER_ERROR,
        "SIGXFSZ",
        "ulimit -f",
    ),
    "its CPU time is used up": broken(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_CPU, (1, 5))
        while True: pass
        """,
        K.USER_ERROR,
        "SIGXCPU",
        "ulimit -t",
    ),
    "it has no more files": broken(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))
        files = [open("/dev/null") for _ in range(10)]
        """,
        K.STORAGE,
        "Too many open files",
    ),
    "it has no more memory": broken(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        bytearray(1 << 30)
        """,
        K.OOM_HOST,
        "MemoryError",
    ),
    # How it ends.
    "out of device memory": broken(
        "sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB')",
        K.OOM_GPU,
        "Tried to allocate 2.00 GiB",
    ),
    "a segmentation fault": broken("os.kill(os.getpid(), 11)", K.SEGFAULT, "SIGSEGV"),
    "it aborts": broken("os.abort()", K.SEGFAULT, "SIGABRT"),
    "it is killed": broken("os.kill(os.getpid(), 9)", K.KILLED, "SIGKILL"),
    "it kills its rank": broken("os.kill(os.getppid(), 9); time.sleep(60)", K.KILLED, "SIGKILL"),
    "it ends with a text": broken(
        "sys.exit('global batch 8 is not divisible by 3')",
        K.USER_ERROR,
        "global batch 8 is not divisible by 3",
    ),
    "it ends with a number": broken("os._exit(77)", K.USER_ERROR, "exit code 77"),
    "it is interrupted": broken("raise KeyboardInterrupt", K.PREEMPTED, "KeyboardInterrupt"),
    "no GPU for its torch": broken(
        "raise RuntimeError('No CUDA GPUs are available')", K.DEVICE_ERROR, "No CUDA GPUs"
    ),
    "a port that is taken": broken(
        """
        import socket
        one, two = socket.socket(), socket.socket()
        one.bind(("127.0.0.1", 0)); one.listen()
        two.bind(one.getsockname())
        """,
        K.PORT_CLASH,
        "Address already in use",
    ),
    "it forks and exits": broken(
        """
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
        """,
        K.BAD_RESULT,
        "wrote 0 steps",
    ),
    "it leaves a daemon and its numbers": broken(
        STEPS
        + """
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "60"], {})
        """,
        None,
    ),
    # It hangs.
    "it hangs before its first step": broken(
        "time.sleep(60)", K.HUNG, "first_step limit of 2 s passed", limits=HANGS
    ),
    "it hangs after some steps": broken(
        FEW + "time.sleep(60)", K.HUNG, "after step 4", limits=HANGS
    ),
    "it hangs and ignores every signal": broken(
        """
        import signal
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(60)
        """,
        K.HUNG,
        "first_step limit of 2 s passed",
        limits=HANGS,
    ),
    "it stops itself": broken(
        "import signal; os.kill(os.getpid(), signal.SIGSTOP)", K.HUNG, "limit of 2 s", limits=HANGS
    ),
    "its ranks wait for each other": broken(
        """
        import socket
        listening = socket.create_server(("127.0.0.1", 0))
        listening.accept()
        """,
        K.HUNG,
        "limit of 2 s passed",
        limits=HANGS,
        world_size=2,
    ),
    "one rank crashes and the other waits": broken(
        """
        if os.environ["RANK"] == "1":
            raise ValueError("expert 3 has no tokens")
        time.sleep(60)
        """,
        K.USER_ERROR,
        "rank 1",
        "expert 3 has no tokens",
        world_size=2,
    ),
    # What it prints.
    "its output is closed": broken(
        "os.close(1); os.close(2); os._exit(3)", K.USER_ERROR, "exit code 3"
    ),
    "a progress bar": broken(
        """
        for step in range(2000):
            print(f"\\r{step}/2000", end="", flush=True)
        raise ValueError("bad shard")
        """,
        K.USER_ERROR,
        "ValueError: bad shard",
    ),
    "output that is no UTF-8": broken(
        "sys.stderr.buffer.write(bytes(range(256)) * 40); b'\\xff'.decode()",
        K.USER_ERROR,
        "UnicodeDecodeError",
    ),
    "a flood of output": broken(
        "sys.stdout.write(('y' * 79 + '\\n') * 200_000); raise ValueError('after the flood')",
        K.USER_ERROR,
        "after the flood",
    ),
    "a secret in its last words": broken(
        "raise ValueError('token ' + os.environ['MY_SECRET_TOKEN'])",
        K.USER_ERROR,
        "ValueError: token ***",
        options={"env_from": ["MY_SECRET_TOKEN"]},
        secrets={"MY_SECRET_TOKEN": "hunter2-hunter2"},
    ),
}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path_factory.mktemp("runs"), node="node-a")
    yield launcher
    launcher.close()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_broken_program_ends_in_one_true_sentence_and_leaves_nothing(
    launcher: NodeLauncher, name: str, tmp_path: Path
) -> None:
    case = PROGRAMS[name]
    known = dict(case.known)
    if content := known.pop("content", None):
        file = tmp_path / "train"
        file.write_bytes(content)
        file.chmod(known.pop("mode"))
        known["argv"] = [str(file)]
    asked = order_of(case.program, **known)
    began = time.monotonic()
    report = launcher.run(asked)
    outcome = judge(asked, report)
    assert left_of(asked) == []
    # Two wardens and the rank server: what a next attempt uses again.
    assert len(tree_of(launcher.root)) <= 3
    if case.kind is None:
        assert not isinstance(outcome, Failure), outcome
        return
    assert isinstance(outcome, Failure)
    sentence = outcome.message
    assert outcome.kind is case.kind, sentence
    assert all(words in sentence for words in case.said), sentence
    assert "\n" not in sentence and len(sentence) < 700
    assert "hunter2" not in str(report)
    assert time.monotonic() - began < 30
