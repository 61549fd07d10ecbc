"""The code that a fingerprint names is the measured project's own, as git has it; not that of a repository that happens to lie around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import provenance
from orchestrator.core.fingerprint import Fingerprint
from orchestrator.provenance import code_fingerprint

PACKAGE = Path(provenance.__file__).parent
_IDENTITY = {f"GIT_{who}_{what}": f"a@{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(project: Path, *arguments: str) -> str:
    environment = os.environ | _IDENTITY | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", "-C", project, *arguments], check=True, capture_output=True, text=True, env=environment).stdout.strip()


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
    ask = "from orchestrator import provenance as p; print(p.code_fingerprint(p.PACKAGE / 'cli').model_dump_json())"
    done = subprocess.run([sys.executable, "-c", ask], cwd=folder, check=True, capture_output=True, text=True)
    return Fingerprint.model_validate_json(done.stdout)


def test_a_package_installed_inside_somebody_s_project_does_not_take_that_project_s_commits_for_its_own(project: Path) -> None:
    installed = project / ".venv" / "site-packages"
    shutil.copytree(PACKAGE, installed / "orchestrator", ignore=shutil.ignore_patterns("__pycache__"))
    assert state(fingerprint_by_the_package_in(installed)) == (None, None)
    copied = shutil.copytree(installed / "orchestrator", project / "orchestrator").parent
    commit(copied)  # the package as a part of the project: now its commits count
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
    (project / "train.py").write_text("changed()\n")  # beside it, and part of the same program
    assert code_fingerprint(project / "inner").dirty_diff_digest is not None


def test_a_changed_a_new_and_a_rewritten_source_are_other_code_and_results_are_not(project: Path) -> None:
    digests = [code_fingerprint(project).dirty_diff_digest]
    for name, text in (("train.py", "1\n"), ("new.py", "1\n"), ("new.py", "2\n"), ("näme.py", "2\n")):
        (project / name).write_text(text)
        digests.append(code_fingerprint(project).dirty_diff_digest)
    assert len(set(digests)) == len(digests)
    for name in ("ignored.py", "result.json", "mine.yaml"):
        (project / name).write_text("of no run of the program")
    assert code_fingerprint(project).dirty_diff_digest == digests[-1]


def test_of_a_large_new_file_only_the_size_counts_and_of_many_only_the_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
