"""Which code is measured: the git state of the project that holds the workload, as far as git tells."""

from __future__ import annotations

import hashlib
import logging
import subprocess
from pathlib import Path

from orchestrator import __version__
from orchestrator.core.fingerprint import Fingerprint, Stack

logger = logging.getLogger(__name__)

GIT_SECONDS = 20.0
PACKAGE = Path(__file__).resolve().parent
# New files that may be part of a program. Data, logs and sweep files come and go while a sweep is measured, and are none.
SOURCE_SUFFIXES = frozenset({".py", ".pyx", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs"})
MAX_UNTRACKED_FILES = 1_000  # beyond them only the number counts: nobody writes so many sources, a forgotten environment holds them
MAX_UNTRACKED_BYTES = 1 << 20  # of a file; of a larger one only the size counts


def code_fingerprint(project: Path) -> Fingerprint:
    """The code's part of a fingerprint; the stack is added by what the ranks saw. Outside a checkout the git fields are None.

    A repository around this package counts only where it tracks the package: installed in an environment inside somebody's project,
    the package is not that project's code, and the project's commits change nothing that is measured.
    """
    top = _git(project, "rev-parse", "--show-toplevel")
    sha = _git(project, "rev-parse", "HEAD") if top is not None and _owns(project) else None
    if top is None or sha is None:
        return Fingerprint(orchestrator_version=__version__)
    uncommitted = "".join((_git(project, "diff", "HEAD", "--no-ext-diff", "--no-color") or "", *_untracked_sources(Path(top))))
    digest = hashlib.sha256(uncommitted.encode(errors="surrogateescape")).hexdigest()[:16] if uncommitted else None
    return Fingerprint(orchestrator_version=__version__, git_sha=sha, dirty_diff_digest=digest)


def with_stack(code: Fingerprint, stack: Stack) -> Fingerprint:
    return code.model_copy(update={"stack": stack})


def _owns(project: Path) -> bool:
    """Whether the repository around a folder is the code's own. A folder that somebody names as his project is taken at his word."""
    if not project.resolve().is_relative_to(PACKAGE):
        return True
    return _git(PACKAGE, "ls-files", "--error-unmatch", "--", "__init__.py") is not None


def _untracked_sources(top: Path) -> list[str]:
    """A line per new source file that git does not ignore: its name and its content's digest."""
    listed = _git(top, "ls-files", "--others", "--exclude-standard", "-z") or ""
    names = sorted(name for name in listed.split("\0") if Path(name).suffix in SOURCE_SUFFIXES)
    lines = [f"\n? {name} {_content_digest(top / name)}" for name in names[:MAX_UNTRACKED_FILES]]
    return lines if len(names) <= MAX_UNTRACKED_FILES else [*lines, f"\n? {len(names)} files"]


def _content_digest(file: Path) -> str:
    try:
        size = file.stat().st_size
        return hashlib.sha256(file.read_bytes()).hexdigest() if size <= MAX_UNTRACKED_BYTES else f"{size} bytes"
    except OSError as exc:  # a link to nowhere, or no permission to read
        return type(exc).__name__


def _git(project: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(project), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        logger.debug("No git state of %s: %s", project, exc)
        return None
    return done.stdout.strip() if done.returncode == 0 else None
