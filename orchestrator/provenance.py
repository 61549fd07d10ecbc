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


def code_fingerprint(project: Path) -> Fingerprint:
    """The code's part of a fingerprint; the stack is added by what the ranks saw. Outside a checkout the git fields are None."""
    sha = _git(project, "rev-parse", "HEAD")
    diff = _git(project, "diff", "HEAD", "--no-ext-diff", "--no-color") if sha is not None else None
    digest = hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else None
    return Fingerprint(orchestrator_version=__version__, git_sha=sha, dirty_diff_digest=digest)


def with_stack(code: Fingerprint, stack: Stack) -> Fingerprint:
    return code.model_copy(update={"stack": stack})


def _git(project: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(project), *arguments], capture_output=True, text=True, errors="replace", timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        logger.debug("No git state of %s: %s", project, exc)
        return None
    return done.stdout.strip() if done.returncode == 0 else None
