"""The code that a fingerprint names is the measured project's own, as git has it; not that of a
repository that happens to lie around it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.sweep import provenance
from orchestrator.sweep.provenance import code_fingerprint

PACKAGE = provenance.PACKAGE
_IDENTITY = {
    f"GIT_{who}_{what}": f"a@{what}"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


def git(project: Path, *arguments: str) -> str:
    environment = (
        os.environ | _IDENTITY | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    )
    return subprocess.run(
        ["git", "-C", project, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    ).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a program."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text(".venv/\n__pycache__/\nignored.py\n")
    (tmp_path / "train.py").write_text("pass\n")
    commit(tmp_path)
    return tmp_path


def commit(project: Path) -> None:
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--allow-empty", "-m", "a")


def state(found: Fingerprint) -> tuple[str | None, str | None]:
    return found.git_sha, found.dirty_diff_digest


def fingerprint_by_the_package_in(folder: Path) -> Fingerprint:
    """As the package that is installed in this folder says it, of itself."""
    ask = (
        "from orchestrator.sweep import provenance as p;"
        " print(p.code_fingerprint(p.PACKAGE / 'cli').model_dump_json())"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=folder, check=True, capture_output=True, text=True
    )
    return Fingerprint.model_validate_json(done.stdout)


def test_a_package_installed_inside_somebody_s_project_does_not_take_that_project_s_commits(
    project: Path,
) -> None:
    installed = project / ".venv" / "site-packages"
    shutil.copytree(
        PACKAGE, installed / "orchestrator", ignore=shutil.ignore_patterns("__pycache__")
    )
    assert state(fingerprint_by_the_package_in(installed)) == (None, None)
    copied = shutil.copytree(installed / "orchestrator", project / "orchestrator").parent
    # The package as a part of the project: now its commits count.
    commit(copied)
    assert state(fingerprint_by_the_package_in(copied)) == (git(project, "rev-parse", "HEAD"), None)


def test_a_folder_that_somebody_names_is_his_project_though_git_ignores_it(project: Path) -> None:
    (project / ".venv").mkdir()
    assert code_fingerprint(project / ".venv").git_sha == git(project, "rev-parse", "HEAD")


def test_a_checkout_is_known_by_its_commit(project: Path) -> None:
    assert state(code_fingerprint(project)) == (git(project, "rev-parse", "HEAD"), None)


def test_a_tracked_folder_is_that_of_its_repository(project: Path) -> None:
    (project / "inner").mkdir()
    (project / "inner" / "part.py").write_text("1\n")
    commit(project)
    assert code_fingerprint(project / "inner").git_sha == git(project, "rev-parse", "HEAD")
    # This file is outside the folder, but part of the same program.
    (project / "train.py").write_text("changed()\n")
    assert code_fingerprint(project / "inner").dirty_diff_digest is not None


def test_a_changed_a_new_and_a_rewritten_source_are_other_code_and_results_are_not(
    project: Path,
) -> None:
    digests = [code_fingerprint(project).dirty_diff_digest]
    for name, text in (
        ("train.py", "1\n"),
        ("new.py", "1\n"),
        ("new.py", "2\n"),
        ("näme.py", "2\n"),
    ):
        (project / name).write_text(text)
        digests.append(code_fingerprint(project).dirty_diff_digest)
    assert len(set(digests)) == len(digests)
    for name in ("ignored.py", "result.json", "mine.yaml"):
        (project / name).write_text("of no run of the program")
    assert code_fingerprint(project).dirty_diff_digest == digests[-1]


def test_of_a_large_new_file_only_the_size_counts_and_of_many_only_the_first(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MAX_UNTRACKED_BYTES", 10)
    monkeypatch.setattr(provenance, "MAX_UNTRACKED_FILES", 2)
    (project / "a.py").write_text("a" * 11)
    before = code_fingerprint(project)
    (project / "a.py").write_text("b" * 11)
    assert code_fingerprint(project) == before
    (project / "a.py").write_text("b" * 12)
    assert code_fingerprint(project) != before
    (project / "b.py").write_text("b")
    before = code_fingerprint(project)
    (project / "c.py").write_text("c")
    assert code_fingerprint(project) != before  # their number counts still
    before = code_fingerprint(project)
    (project / "c.py").write_text("d")
    assert code_fingerprint(project) == before


def break_the_diff(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed blob is gone, so git knows the commit, and cannot compare it."""
    blob = git(project, "rev-parse", "HEAD:train.py")
    (project / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    (project / "train.py").write_text("changed()\n")


def slow_the_diff(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = project.parent / f"{project.name}-tools"
    tools.mkdir()
    (tools / "git").write_text(
        '#!/bin/sh\ncase "$*" in *" diff "*) exec sleep 60;; esac\n'
        f'exec {shutil.which("git")} "$@"\n'
    )
    (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setattr(provenance, "GIT_SECONDS", 5.0)


@pytest.mark.parametrize("spoil", [break_the_diff, slow_the_diff])
def test_what_git_does_not_tell_is_not_taken_for_clean(
    project: Path,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clean = state(code_fingerprint(project))
    assert clean[1] is None
    spoil(project, monkeypatch)
    assert state(code_fingerprint(project)) == (clean[0], "unknown")
    assert [
        record.levelname
        for record in caplog.records
        if "Git cannot list the uncommitted changes" in record.message
    ] == ["WARNING"]


def test_outside_a_checkout_nothing_is_claimed(tmp_path: Path) -> None:
    assert state(code_fingerprint(tmp_path)) == (None, None)
    assert state(code_fingerprint(tmp_path / "missing")) == (None, None)


def test_this_checkout_is_tracked_by_its_own_repository() -> None:
    try:
        head = git(PACKAGE, "rev-parse", "HEAD")
        git(PACKAGE, "ls-files", "--error-unmatch", "__init__.py")
    except subprocess.CalledProcessError:
        pytest.skip("not a checkout")
    assert code_fingerprint(PACKAGE).git_sha == head


# --- somebody's program outside a checkout --------------------------------------------------------


ARGV = ["python", "train.py", "--settings=run.toml", "{micro_batch_size}"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with a program, and what lies about in such folders."""
    folder = tmp_path / "program"
    for name, text in {
        "train.py": "import layers.block\n",
        "layers/block.py": "pass\n",
        "run.toml": "seed = 1\n",
        "sweep.yaml": "name: t\n",
        "out/runs/t/trial-1/copy.py": "pass\n",
        ".venv/lib/a.py": "pass\n",
        "env/pyvenv.cfg": "home = /usr\n",
        "env/lib/a.py": "pass\n",
        "__pycache__/train.py": "pass\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def program_digest(program: Path, *argv: str, cwd: Path | None = None) -> str | None:
    found = provenance.program_fingerprint(argv or ARGV, cwd=cwd or program, skip=[program / "out"])
    assert found.git_sha is None
    return found.dirty_diff_digest


def test_the_same_program_in_another_folder_is_the_same_code(program: Path, tmp_path: Path) -> None:
    digest = program_digest(program)
    assert digest is not None
    assert digest.startswith("files:")
    copy = shutil.copytree(program, tmp_path / "copy")  # files with other times
    assert program_digest(copy) == digest


@pytest.mark.parametrize(
    "changed", ["train.py", "layers/block.py", "run.toml", "layers/new.py", "tool"]
)
def test_a_changed_line_a_new_source_or_a_file_that_is_named_is_other_code(
    program: Path, changed: str
) -> None:
    before = program_digest(program)
    (program / changed).write_text("changed\n")
    (program / changed).chmod(0o755)
    assert program_digest(program) != before


@pytest.mark.parametrize("is_checkout", [False, True])
def test_the_files_that_were_written_last_are_those_that_count(
    program: Path, is_checkout: bool
) -> None:
    skip = [program / "out"]
    if is_checkout:
        (program / ".gitignore").write_text("out\n.venv\nenv\n__pycache__\n")
        git(program, "init", "--quiet")
        commit(program)
    names = ["train.py", "notes.txt", "probe.py", "out/runs/t/trial-1/copy.py", "env/lib/a.py"]
    for age, name in enumerate(names):
        (program / name).write_text("changed\n")
        os.utime(program / name, (2e9 - age, 2e9 - age))
    changed = [program / "train.py", program / "probe.py"]
    found = provenance.last_written(ARGV, cwd=program, skip=skip)
    assert found[:2] == changed
    # Those that did not change are committed in a checkout.
    assert len(found) == (2 if is_checkout else provenance.MAX_LAST_WRITTEN)


@pytest.mark.parametrize(
    "changed",
    [
        "out/runs/t/trial-1/log-0.txt",
        "out/runs/t/trial-1/copy.py",
        "log.txt",
        "metrics.jsonl",
        "sweep.yaml",
        ".venv/lib/a.py",
        "env/lib/a.py",
    ],
)
def test_what_a_trial_writes_and_what_is_no_part_of_the_program_changes_nothing(
    program: Path, changed: str
) -> None:
    before = program_digest(program)
    (program / changed).write_text("written by a trial\n")
    assert program_digest(program) == before


def test_a_log_that_the_arguments_name_is_written_by_the_program_and_changes_nothing(
    program: Path,
) -> None:
    argv = [*ARGV, "--log=train.log"]
    before = program_digest(program, *argv)
    (program / "train.log").write_text("step 1\n")
    assert program_digest(program, *argv) == before


def test_a_link_is_known_by_where_it_leads_and_not_followed(program: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "far.py").write_text("1\n")
    (program / "far.py").symlink_to(other / "far.py")
    (program / "all").symlink_to(other)
    before = program_digest(program)
    (other / "far.py").write_text("2\n")
    assert program_digest(program) == before
    (program / "far.py").unlink()
    (program / "far.py").symlink_to("layers/block.py")
    assert program_digest(program) != before


@pytest.mark.parametrize(
    ("bound", "value"),
    [("MAX_PROGRAM_FILES", 2), ("MAX_PROGRAM_BYTES", 30), ("MAX_PROGRAM_ENTRIES", 4)],
)
def test_of_more_files_than_the_bound_names_sizes_and_times_count_and_that_is_said(
    program: Path,
    bound: str,
    value: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(provenance, bound, value)
    before = program_digest(program)
    assert before is not None
    assert before.startswith("stat:")
    assert "identified by names, sizes and times of files" in caplog.text
    assert program_digest(program) == before
    os.utime(program / "train.py", (1, 1))
    assert program_digest(program) != before


def test_without_a_working_directory_the_folder_of_the_script_is_the_project(
    program: Path, tmp_path: Path
) -> None:
    argv = ["python", str(program / "train.py")]
    before, elsewhere = (
        provenance.program_fingerprint(argv, cwd=cwd) for cwd in (None, tmp_path / "data")
    )
    # A script outside the working directory counts as the same program.
    assert elsewhere == before
    (program / "layers" / "block.py").write_text("changed\n")
    assert provenance.program_fingerprint(argv, cwd=None) != before
    git(program, "init", "--quiet")
    commit(program)
    assert state(provenance.program_fingerprint(argv, cwd=None)) == (
        git(program, "rev-parse", "HEAD"),
        None,
    )


def test_a_program_in_a_checkout_is_known_by_its_commit(project: Path) -> None:
    assert state(provenance.program_fingerprint(["python", "train.py"], cwd=project)) == (
        git(project, "rev-parse", "HEAD"),
        None,
    )


@pytest.mark.parametrize(
    "argument",
    [
        "{name}",
        "--settings={name}",
        "{project}/{name}",
        "--settings={project}/{name}",
        "../{folder}/{name}",
    ],
)
@pytest.mark.parametrize(
    "name", ["run.toml", "ignored.py", ".venv/big.toml", "out of it/run.toml", "[r]un.toml"]
)
def test_a_named_file_that_git_does_not_track_is_part_of_a_program_in_a_checkout(
    project: Path, argument: str, name: str
) -> None:
    file = project / name
    file.parent.mkdir(exist_ok=True)
    argv = ["python", "train.py", argument.format(name=name, project=project, folder=project.name)]

    def found() -> tuple[str | None, str | None]:
        return state(provenance.program_fingerprint(argv, cwd=project))

    absent = found()
    assert absent == (git(project, "rev-parse", "HEAD"), None)
    file.write_text("seed = 1\n")
    first = found()
    file.write_text("seed = 2\n")
    second = found()
    assert len({absent, first, second}) == 3
    os.utime(file, (1, 1))
    assert found() == second  # of its content
    (project / "train.py").write_text("changed()\n")
    changed = found()
    assert changed != second
    file.write_text("seed = 1\n")
    assert found() != changed


def test_a_named_file_that_git_knows_changes_nothing_beyond_what_git_says(project: Path) -> None:
    (project / "run.toml").write_text("seed = 1\n")
    commit(project)

    def is_as_git_says() -> bool:
        return provenance.program_fingerprint(
            ["python", "train.py", "--settings=run.toml", "new.py"], cwd=project
        ) == code_fingerprint(project)

    assert is_as_git_says()
    (project / "run.toml").write_text("seed = 2\n")
    assert is_as_git_says()
    (project / "new.py").write_text("new, named, and counted with the new sources already\n")
    assert is_as_git_says()


def test_of_a_named_link_both_where_it_leads_and_what_is_there_count(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run.toml"
    elsewhere.write_text("seed = 1\n")
    (project / "run.toml").symlink_to(elsewhere)
    (project / "a.toml").write_text("seed = 3\n")
    commit(project)
    (project / "ignored.py").symlink_to("a.toml")

    def found(name: str) -> Fingerprint:
        return provenance.program_fingerprint(["python", "train.py", name], cwd=project)

    # Git tracks the link, not what it leads to.
    before = found("run.toml")
    elsewhere.write_text("seed = 2\n")
    assert found("run.toml") != before
    # Git tracks what it leads to, not the link.
    before = found("ignored.py")
    (project / "ignored.py").unlink()
    (project / "ignored.py").symlink_to("train.py")
    assert found("ignored.py") != before


def test_of_large_named_files_names_sizes_and_times_count(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provenance, "MAX_PROGRAM_BYTES", 3)
    (project / "tokens.bin").write_text("data")
    before = provenance.program_fingerprint(["python", "train.py", "tokens.bin"], cwd=project)
    assert "1 files, 0 MiB that argv and env name" in caplog.text
    os.utime(project / "tokens.bin", (1, 1))
    assert (
        provenance.program_fingerprint(["python", "train.py", "tokens.bin"], cwd=project) != before
    )


def test_settings_that_git_does_not_know_count_though_git_does_not_tell_the_rest(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "run.toml").write_text("seed = 1\n")
    break_the_diff(project, monkeypatch)
    digests = []
    for text in ("seed = 1\n", "seed = 2\n"):
        (project / "run.toml").write_text(text)
        digests.append(
            provenance.program_fingerprint(
                ["python", "train.py", "run.toml"], cwd=project
            ).dirty_diff_digest
            or ""
        )
    assert len(set(digests)) == 2
    assert all(digest.startswith("unknown ") for digest in digests)


def test_a_program_of_which_nothing_is_found_is_taken_for_this_package_s_code(
    tmp_path: Path,
) -> None:
    assert provenance.program_fingerprint(
        ["python", "-m", "somewhere"], cwd=None
    ) == code_fingerprint(PACKAGE)
    assert state(
        provenance.program_fingerprint(["python", "x" * 5000, "a\0b"], cwd=tmp_path / "{precision}")
    ) == (None, None)


def test_a_program_alone_without_a_source_s_name_is_its_contents(tmp_path: Path) -> None:
    binary = tmp_path / "train"
    binary.write_bytes(b"\x7fELF")
    before = program_digest(tmp_path, str(binary), cwd=tmp_path / "data")
    binary.write_bytes(b"\x7fELF2")
    assert before is not None
    assert program_digest(tmp_path, str(binary), cwd=tmp_path / "data") != before


def test_the_files_that_a_person_edits_are_named_ones_and_sources(project: Path) -> None:
    (project / "run.toml").write_text("steps = 3\n")
    (project / "data.json").write_text("{}\n")
    (project / "ignored.py").write_text("pass\n")
    (project / "new.py").write_text("pass\n")
    argv = ["python", "train.py", "--settings=run.toml"]
    expected = {project / name for name in ("train.py", "run.toml", "new.py")}
    assert set(provenance.sources(argv, project)) == expected
    shutil.rmtree(project / ".git")
    assert set(provenance.sources(argv, project)) == expected | {project / "ignored.py"}
    (project / "out").mkdir()
    (project / "out" / "written.py").write_text("pass\n")
    skip = [project / "out"]
    assert set(provenance.sources(argv, project, skip=skip)) == expected | {project / "ignored.py"}
    assert provenance.sources(["true"], None) == []


def test_folders_are_not_watched_and_the_program_s_own_sources_come_first(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MAX_PROGRAM_FILES", 4)
    own = project / "zz"
    for folder in ("a", "b", "c", "d", "e", "zz"):
        (project / folder).mkdir()
        (project / folder / "model.py").write_text("pass\n")
    (own / "data" / "step-1").mkdir(parents=True)
    (own / "train.py").write_text("pass\n")
    for _ in ("in a checkout", "outside of one"):
        found = provenance.sources(["python", "train.py"], own)
        assert set(found[:2]) == {own / "train.py", own / "model.py"}
        assert all(path.is_file() for path in found)
        shutil.rmtree(project / ".git", ignore_errors=True)


def test_the_program_s_own_sources_come_first_through_a_link_too(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MAX_PROGRAM_FILES", 2)
    for folder in ("a", "zz"):
        (project / folder).mkdir()
        (project / folder / "model.py").write_text("pass\n")
    link = tmp_path / "link"
    link.symlink_to(project)
    found = provenance.sources(["true"], link / "zz")
    assert found[0].resolve() == project.resolve() / "zz" / "model.py"
