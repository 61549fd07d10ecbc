"""A secret named by `env_from` reaches each rank's program, and nothing that we write."""

from __future__ import annotations

import base64
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import cli
from tests.acceptance.command import Command

CANARY = "canary-7f3a9e51c2"  # what is looked for
OTHER = "other-5e1f0c77"  # present, but not requested
PROGRAM = """
    import json, os, sys
    token, mbs = os.environ["WANDB_API_KEY"], int(sys.argv[1])
    assert token.startswith("canary") and token not in "".join(sys.argv)
    if mbs == 2:
        raise SystemExit("a program that fails")
    if os.environ["RANK"] == "0":
        steps = [0.01 + step / 1e5 for step in range(6)]
        result = {"step_seconds": steps, "loss_last": float(len(token))}
        json.dump(result, open(os.environ["SWEEP_RESULT_FILE"], "w"))
"""

# Each layout gives the secret away in another manner.
LEAKING = """
    import base64, json, os, sys, time, urllib.parse
    token, mbs = os.environ["WANDB_API_KEY"], int(sys.argv[1])
    forms = [token, base64.b64encode(f"user:{token}".encode()).decode(), token.encode().hex()]
    forms += [json.dumps({"key": token}), token[:7] + "\\n" + token[7:]]
    print(*forms, sep="\\n")
    print("mine.py", dict(os.environ), end="")
    print()
    pid = os.getpid()
    while pid > 1:
        if b"AWS_SECRET_ACCESS_KEY=" in open(f"/proc/{pid}/environ", "rb").read():
            print("seen by", open(f"/proc/{pid}/cmdline", "rb").read())
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    sys.stdout.flush()
    os.write(2, token[:9].encode())  # two writes, of which the log gets one at a time
    time.sleep(0.3)
    os.write(2, token[9:].encode())
    if mbs == 2:
        raise ValueError(f"401 for https://me:{token}@host/ {forms}")
    if mbs == 4:
        raise SystemExit(f"cannot log in with {urllib.parse.quote('/' + token)}")
    if mbs == 8:
        open(os.environ["SWEEP_METRICS_FILE"], "w").write(f"{token}\\n")
        raise SystemExit(0)
    if mbs == 16:
        result = {"step_seconds": [0.01], token: 1}
        json.dump(result, open(os.environ["SWEEP_RESULT_FILE"], "w"))
        raise SystemExit(0)
    if os.environ["RANK"] == "0":
        result = {"step_seconds": [0.01 + i / 1e5 for i in range(6)], "peak_flops": 1e12}
        result["peak_flops_source"] = f"measured: {token}"
        json.dump(result, open(os.environ["SWEEP_RESULT_FILE"], "w"))
"""


def write(folder: Path, program: str = PROGRAM) -> Path:
    (folder / "mine.py").write_text(textwrap.dedent(program))
    content = {
        "name": "secret", "model": "llama-tiny", "gpus": 1, "device": "cpu",
        "sequence_length": 64, "global_batch_size": 4, "precision": "bf16",
        "axes": {"micro_batch_size": [1, 2], "recompute": "none"},
        "measurement": {"warmup_steps": 2, "min_steps": 6, "max_steps": 6},
        "workload": {"name": "command", "options": {
            "argv": [sys.executable, "mine.py", "{micro_batch_size}"],
            "cwd": str(folder), "env_from": ["WANDB_API_KEY"],
        }},
    }  # fmt: skip
    path = folder / "secret.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


Reader = Callable[..., str]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reader:
    """Runs a command that reads in this process: another would first import everything."""

    def read(sweep: Command, *arguments: str) -> str:
        with monkeypatch.context() as patched:
            patched.chdir(sweep.folder)
            for name, value in {"SWEEP_DB": sweep.store_url, **sweep.environment}.items():
                patched.setenv(name, value)
            capsys.readouterr()
            assert cli.main(arguments) == 0
        out, err = capsys.readouterr()
        return out + err

    return read


def files_with(text: str, folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    )


@pytest.mark.acceptance
def test_a_secret_reaches_every_rank_and_no_file_table_or_message(
    tmp_path: Path, reader: Reader
) -> None:
    sweep = Command(
        tmp_path,
        f"sqlite:///{tmp_path}/sweep.sqlite",
        {"SWEEP_HOME": str(tmp_path / "home"), "WANDB_API_KEY": CANARY},
    )
    ran = sweep.run("-vv", "run", write(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert sweep.sql("select state, loss_last from v_trial order by micro_batch_size") == [
        ["measured", len(CANARY)],
        ["failed", None],
    ]
    said = [ran.stdout, ran.stderr]
    for arguments in (("show", "2"), ("logs", "2"), ("export", "json", "secret")):
        said.append(reader(sweep, *arguments))
    assert all(said[2:]) and [text for text in said if CANARY in text] == []
    # The search covers requests, logs and the store.
    assert len(files_with("mine.py", tmp_path)) >= 4
    assert files_with(CANARY, tmp_path) == []


@pytest.mark.long
@pytest.mark.acceptance
def test_a_secret_that_a_program_prints_is_removed_before_anything_is_stored(
    tmp_path: Path, reader: Reader
) -> None:
    others = {
        "AWS_SECRET_ACCESS_KEY": OTHER,
        "MY_TOKEN": OTHER,
        "MY_SETTING": "on",
        "MINE_TOO": "yes",
        "UNRELATED": OTHER,
    }
    environment = {"SWEEP_HOME": str(tmp_path / "home"), "WANDB_API_KEY": CANARY, **others}
    sweep = Command(tmp_path, f"sqlite:///{tmp_path}/sweep.sqlite", environment)
    wanted = (
        "global_batch_size=16",
        "axes.micro_batch_size=[1, 2, 4, 8, 16]",
        "workload.options.pass_env=[MY_*, MINE_TOO]",
    )
    ran = sweep.run("-vv", "run", write(tmp_path, LEAKING), *wanted)
    assert ran.returncode == 0, ran.stderr
    rows = sweep.sql(
        "select t.micro_batch_size, t.state, f.failure_kind, f.failure_message from v_trial t "
        "left join v_failure f using (trial_id) order by 1"
    )
    assert [row[:3] for row in rows] == [
        [1, "measured", None],
        [2, "failed", "user_error"],
        [4, "failed", "user_error"],
        [8, "failed", "bad_result"],
        [16, "failed", "bad_result"],
    ]
    assert (
        "401 for https://me:***@host/" in rows[1][3]
        and rows[1][3].count("***") == 6
        and "the first: ***" in rows[3][3]
    )
    trials = [
        str(row[0]) for row in sweep.sql("select trial_id from v_trial order by micro_batch_size")
    ]
    said = [ran.stdout, ran.stderr]
    said += [reader(sweep, command, trials[1]) for command in ("show", "logs")]
    said += [reader(sweep, "export", kind, "secret") for kind in ("json", "csv")]
    said += [
        reader(sweep, "sql", f"select * from {table}")
        for table in ("v_event", "attempt", "v_failure")
    ]
    assert all(said[2:])
    for form in (
        CANARY,
        CANARY.encode().hex(),
        base64.b64encode(CANARY.encode()).decode()[:20],
        OTHER,
    ):
        assert [text for text in said if form in text] == []
        left = [
            name
            for name in files_with(form, tmp_path)
            if not name.endswith(("program-result.json", "program-metrics.jsonl"))
        ]
        assert left == []  # the program's own files
    assert "cannot log in with /***" in reader(sweep, "logs", trials[2])
    log = reader(sweep, "logs", trials[0])
    assert log.count("***") >= 7
    assert "'MY_SETTING': 'on'" in log and "'MINE_TOO': 'yes'" in log and "'PATH':" in log
    # Among all processes above the program, Ray's included, only the orchestrator and what started
    # it have the rest.
    seen_by = [line for line in log.splitlines() if line.startswith("seen by")]
    assert seen_by and "bin/sweep" in seen_by[0] and not any("ray" in line for line in seen_by)
    assert not any(
        name in log for name in ("AWS_SECRET_ACCESS_KEY", "MY_TOKEN", "UNRELATED", "SWEEP_DB'")
    )


def test_a_secret_that_is_not_set_is_asked_for_before_anything_starts(tmp_path: Path) -> None:
    sweep = Command(
        tmp_path, f"sqlite:///{tmp_path}/sweep.sqlite", {"SWEEP_HOME": str(tmp_path / "home")}
    )
    refused = sweep.run(
        "run", write(tmp_path), "workload.options.env_from=[NO_SUCH_TOKEN, NOR_THIS_KEY]"
    )
    assert refused.returncode == 2
    assert (
        "workload.options.env_from names NO_SUCH_TOKEN, NOR_THIS_KEY, not set in this environment"
        in refused.stderr
    )
    assert not (tmp_path / "home").exists() and not (tmp_path / "sweep.sqlite").exists()
    assert sweep.ok("validate", tmp_path / "secret.yaml")  # another machine may check it
