"""Identifies the code that is measured, by git state, or by files that git does not know."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from orchestrator import __version__
from orchestrator.core.trial.fingerprint import Fingerprint, Stack

logger = logging.getLogger(__name__)

GIT_SECONDS = 20.0
# Replaces a digest that git could not give. (None says that all is committed.)
UNKNOWN = "unknown"
PACKAGE = Path(__file__).resolve().parent.parent
# New files that may be part of a program. Data, logs and sweep files come and go while a sweep
# runs, and are not.
SOURCE_SUFFIXES = frozenset(
    {".py", ".pyx", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs"}
)
# A program writes them, also where its arguments name them.
LOG_SUFFIXES = frozenset({".err", ".log", ".out"})
# If there are more new files, only their number counts: they are some environment that git does not
# ignore.
MAX_UNTRACKED_FILES = 1_000
# The contents of a file up to this size count; of a larger one only the size does.
MAX_UNTRACKED_BYTES = 1 << 20
# Limits for a program without git. Beyond them names, sizes and times count instead of contents,
# since the sweep should start within a second.
MAX_PROGRAM_FILES = 2_000
MAX_PROGRAM_BYTES = 64 << 20  # of all files
# Most files that are examined; a home folder as `cwd` has more.
MAX_PROGRAM_ENTRIES = 50_000
# Files that `last_written` names.
MAX_LAST_WRITTEN = 3


def code_fingerprint(project: Path) -> Fingerprint:
    """Return the code's part of a fingerprint. Outside a checkout the git fields are None.

    The software stack is added by what the ranks saw. A repository around this package counts only
    if it tracks the package: an environment inside somebody's project may hold the package, and
    the project's commits change nothing that is measured.
    """
    checkout = _checkout(project)
    if checkout is None:
        return Fingerprint(orchestrator_version=__version__)
    return Fingerprint(
        orchestrator_version=__version__,
        git_sha=checkout.sha,
        dirty_diff_digest=checkout.dirty_digest,
    )


def program_fingerprint(
    argv: Sequence[str], cwd: Path | None, *, skip: Sequence[Path] = ()
) -> Fingerprint:
    """Return the fingerprint of somebody's program, by its arguments and the folder it runs in.

    `cwd` is its project, or the folder of a script that `argv` names elsewhere. None: a new folder
    for each run. In a checkout its git state counts, and the files that `argv` names and git does
    not know. Outside of one, `dirty_diff_digest` is that of the files that `argv` names and of the
    project's sources, without what lies under `skip`. If nothing of it can be found, it is taken
    for this package's own.
    """
    named = list(_named_files(argv, cwd))
    project = _project(named, cwd)
    if project is None and not named:
        return code_fingerprint(PACKAGE)
    checkout = _checkout(project) if project is not None else None
    if checkout is None:
        return Fingerprint(
            orchestrator_version=__version__,
            dirty_diff_digest=_program_digest(named, project, skip),
        )
    dirty = checkout.dirty_digest
    if (beside := _program_digest(_unknown_to_git(named, checkout), None, ())) is not None:
        both = _digest_of_lines([dirty or "", beside])
        dirty = both if dirty != UNKNOWN else f"{UNKNOWN} {both}"
    return Fingerprint(
        orchestrator_version=__version__, git_sha=checkout.sha, dirty_diff_digest=dirty
    )


def _project(named: Sequence[tuple[str, Path]], cwd: Path | None) -> Path | None:
    script = next((path for _, path in named if path.suffix in SOURCE_SUFFIXES), None)
    if script is not None and (cwd is None or not script.is_relative_to(cwd)):
        return script.parent
    return cwd


def last_written(
    argv: Sequence[str], cwd: Path | None, *, skip: Sequence[Path] = ()
) -> Sequence[Path]:
    """Return a few of the files in `program_fingerprint`, those that were written last.

    In a checkout those that are committed are left out.
    """
    named = list(_named_files(argv, cwd))
    project = _project(named, cwd)
    checkout = _checkout(project) if project is not None else None
    if checkout is not None:
        diff = _git(checkout.top, "diff", "HEAD", "--no-ext-diff", "--name-only", "-z") or ""
        names = [name for name in (*diff.split("\0"), *checkout.new_sources) if name]
        files = [checkout.top / name for name in names]
        files += [path for _, path in _unknown_to_git(named, checkout)]
    else:
        files = [path for _, path in named]
        if project is not None:
            files += filter(_is_source, islice(_entries(project, skip), MAX_PROGRAM_ENTRIES))
    found = {path.resolve(): path for path in files if _is_file(path)}
    return sorted(found.values(), key=_written_at, reverse=True)[:MAX_LAST_WRITTEN]


def sources(argv: Sequence[str], cwd: Path | None, *, skip: Sequence[Path] = ()) -> Sequence[Path]:
    """Return the files in `program_fingerprint` that a person edits: sources and named files.

    In a checkout these are the sources that git knows, or would add.
    """
    named = list(_named_files(argv, cwd))
    project = _project(named, cwd)
    top = _top(project) if project is not None else None
    if project is not None and top is not None:
        names = _git(top, "ls-files", "--cached", "--others", "--exclude-standard", "-z") or ""
        listed = [top / name for name in names.split("\0") if name]
        # The project's own come first, since only so many are watched. Git resolves links in `top`.
        own = project.resolve()
        found: Iterable[Path] = sorted(listed, key=lambda path: not path.is_relative_to(own))
    elif project is not None:
        found = islice(_entries(project, skip), MAX_PROGRAM_ENTRIES)
    else:
        found = ()
    files = dict.fromkeys([*(path for _, path in named), *filter(_is_source, found)])
    # Folders, and so submodules, are listed too.
    return list(islice(filter(_is_file, files), MAX_PROGRAM_FILES))


def measured_with(
    code: Fingerprint,
    stack: Stack,
    settings: Mapping[str, str],
    packages: tuple[tuple[str, str], ...] = (),
) -> Fingerprint:
    return code.model_copy(
        update={
            "stack": stack,
            "settings": tuple(sorted(settings.items())),
            "packages": packages,
        }
    )


def _owns(project: Path) -> bool:
    """Return whether the repository around a folder is the code's own, or was named by a person."""
    if not project.resolve().is_relative_to(PACKAGE):
        return True
    return _git(PACKAGE, "ls-files", "--error-unmatch", "--", "__init__.py") is not None


@dataclass(frozen=True, kw_only=True)
class _Checkout:
    top: Path
    sha: str
    # None: all is committed. UNKNOWN: git could not tell.
    dirty_digest: str | None
    # Files whose contents are in that digest.
    new_sources: frozenset[str] = frozenset()


def _top(project: Path) -> Path | None:
    """Return the top of the repository that a folder's code belongs to."""
    top = _git(project, "rev-parse", "--show-toplevel")
    return Path(top) if top is not None and _owns(project) else None


def _checkout(project: Path) -> _Checkout | None:
    """Return the repository that a folder's code belongs to, with what is not committed."""
    top = _top(project)
    sha = _git(project, "rev-parse", "HEAD") if top is not None else None
    if top is None or sha is None:
        return None
    diff = _git(project, "diff", "HEAD", "--no-ext-diff", "--no-color")
    listed = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    if diff is None or listed is None:
        logger.warning(
            "Git cannot list the uncommitted changes in %s, so these numbers are not compared with"
            " those of a clean checkout. `git status` there says why",
            top,
        )
        return _Checkout(top=top, sha=sha, dirty_digest=UNKNOWN)
    names = sorted(name for name in listed.split("\0") if Path(name).suffix in SOURCE_SUFFIXES)
    uncommitted = "".join((diff, *_untracked_sources(top, names)))
    return _Checkout(
        top=top,
        sha=sha,
        dirty_digest=hashlib.sha256(uncommitted.encode(errors="surrogateescape")).hexdigest()[:16]
        if uncommitted
        else None,
        new_sources=frozenset(
            name for name in names[:MAX_UNTRACKED_FILES] if _is_small(top / name)
        ),
    )


def _untracked_sources(top: Path, names: Sequence[str]) -> list[str]:
    """Return a line per new source file that git does not ignore: its name and digest."""
    lines = [f"\n? {name} {_content_digest(top / name)}" for name in names[:MAX_UNTRACKED_FILES]]
    return lines if len(names) <= MAX_UNTRACKED_FILES else [*lines, f"\n? {len(names)} files"]


def _is_small(file: Path) -> bool:
    try:
        return file.stat().st_size <= MAX_UNTRACKED_BYTES
    except OSError:
        return False


def _unknown_to_git(
    named: Sequence[tuple[str, Path]], checkout: _Checkout
) -> list[tuple[str, Path]]:
    """Return the named files that git's state does not cover: ignored, no source, or elsewhere."""
    top = checkout.top.resolve()
    # Take both ends of a link: git knows where it leads, not what is there.
    places = {path: {path.parent.resolve() / path.name, path.resolve()} for _, path in named}
    inside = sorted(
        {
            place.relative_to(top).as_posix()
            for ends in places.values()
            for place in ends
            if place.is_relative_to(top)
        }
    )
    listed = _git(top, "--literal-pathspecs", "ls-files", "-z", "--", *inside) if inside else None
    known = {top / name for name in (*(listed or "").split("\0"), *checkout.new_sources) if name}
    return [(name, path) for name, path in named if not places[path] <= known]


def _content_digest(file: Path) -> str:
    try:
        size = file.stat().st_size
        return (
            hashlib.sha256(file.read_bytes()).hexdigest()
            if size <= MAX_UNTRACKED_BYTES
            else f"{size} bytes"
        )
    except OSError as exc:
        # The link leads nowhere, or may not be read.
        return type(exc).__name__


@dataclass(frozen=True, kw_only=True)
class _File:
    name: str
    path: Path
    size: int
    changed_at: int  # nanoseconds
    # Where a link leads; links are not followed.
    link: str | None = None


def _program_digest(
    named: Sequence[tuple[str, Path]], project: Path | None, skip: Sequence[Path]
) -> str | None:
    """Return `files:` and a digest of names and contents.

    If they are too many for that: `stat:` and a digest of names, sizes and times.
    """
    files = [file for name, path in named if (file := _file(name, path, follow=True)) is not None]
    complete = True
    if project is not None:
        project = project.resolve()
        entries = list(islice(_entries(project, skip), MAX_PROGRAM_ENTRIES + 1))
        complete = len(entries) <= MAX_PROGRAM_ENTRIES
        found = (
            _file(path.relative_to(project).as_posix(), path, follow=False)
            for path in entries
            if _is_source(path)
        )
        files += sorted((file for file in found if file is not None), key=lambda file: file.name)
    if not files:
        return None
    num_bytes = sum(file.size for file in files)
    if complete and len(files) <= MAX_PROGRAM_FILES and num_bytes <= MAX_PROGRAM_BYTES:
        return "files:" + _digest_of_lines(f"{f.name}\0{f.link or _sha256(f.path)}" for f in files)
    seen = (
        f"{len(files)} files, {num_bytes / 2**20:.0f} MiB"
        if complete
        else f"more than {MAX_PROGRAM_ENTRIES} entries"
    )
    logger.warning(
        "The code that is measured is identified by names, sizes and times of files, not by their"
        " contents: %s %s. A git repository is more exact",
        seen,
        f"in {project}" if project is not None else "that argv and env name",
    )
    return "stat:" + _digest_of_lines(
        f"{f.name}\0{f.size}\0{f.changed_at}\0{f.link}" for f in files
    )


def changed_since(argv: Sequence[str], *, cwd: Path | None, moment: float) -> Path | None:
    """Return a file that a program's arguments name and that was written after a time, if any."""
    return next((path for _, path in _named_files(argv, cwd) if _written_at(path) > moment), None)


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _named_files(argv: Sequence[str], cwd: Path | None) -> Iterator[tuple[str, Path]]:
    """Return the arguments, also as `--name=value`, that name existing files other than logs."""
    for argument in argv:
        for text in dict.fromkeys((argument, argument.partition("=")[2])):
            path = (cwd or Path()) / text
            is_named = text and (cwd is not None or path.is_absolute())
            if is_named and path.suffix not in LOG_SUFFIXES and _is_file(path):
                yield text, path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        # The text cannot be a file's name: it is too long, or has a NUL.
        return False


def _entries(folder: Path, skip: Sequence[Path]) -> Iterator[Path]:
    """Yield what is in a folder and below it, in a fixed order.

    Hidden folders, caches, environments, links and what is to be skipped are left out.
    """
    skip = [path.resolve() for path in skip]
    for current, folders, names in os.walk(folder):
        here = Path(current)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("__pycache__", "node_modules")
            and not (here / name / "pyvenv.cfg").exists()
            and here / name not in skip
        )
        yield from (here / name for name in folders)
        yield from (here / name for name in sorted(names))


def _is_source(path: Path) -> bool:
    """Return whether a file is part of a program: a source, or something without suffix to run."""
    return path.suffix in SOURCE_SUFFIXES or (not path.suffix and os.access(path, os.X_OK))


def _file(name: str, path: Path, *, follow: bool) -> _File | None:
    try:
        facts = path.stat() if follow else path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            return _File(name=name, path=path, size=0, changed_at=0, link=f"-> {path.readlink()}")
    except OSError:  # gone since it was listed
        return None
    return (
        _File(name=name, path=path, size=facts.st_size, changed_at=facts.st_mtime_ns)
        if stat.S_ISREG(facts.st_mode)
        else None
    )


def _sha256(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as exc:
        return type(exc).__name__


def _digest_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


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
