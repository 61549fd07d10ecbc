"""Changes of code, software or device within a sweep: what they did, and what measures again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.read.rows import FingerprintCounts, SweepRow
    from db.store_reads import StoreReads
    from orchestrator.core.trial.fingerprint import Fingerprint


@dataclass(frozen=True, kw_only=True)
class SoftwareChange:
    """A change, as a sentence, and the command that has the older numbers measured again."""

    text: str
    command: str
    # False: only packages, settings or devices differ.
    is_of_code: bool
    # True: only repeats were measured with the new code or software.
    is_apart: bool = False
    # True: an edit gave the newest numbers and was undone, so that older ones have the code of now.
    is_undone: bool = False

    def sentences(self, hint: str = "") -> str:
        """Say what changed, a hint, and the command."""
        aim = f"measure the layouts with {'these' if self.is_undone else 'older'} numbers again"
        if self.is_apart:
            # A change that was undone is known only to `sweep run`.
            aim = (
                f"rank the new {_what(is_of_code=self.is_of_code)} instead, if the change still"
                " stands"
            )
        return (
            f"{self.text}.{hint} To {aim}, run this and then the same `sweep run`: {self.command}"
        )


def software_changes(
    store: StoreReads,
    sweep_id: int,
    sweep: str,
    *,
    across_cells: bool = False,
    cells: Collection[str] = (),
    code: Callable[[], Fingerprint] | None = None,
) -> list[SoftwareChange]:
    """Read what changed in a sweep. `across_cells`: also if only its cells differ.

    `cells`: the keys of those that a file names, if the sweep has others: these are left alone.
    `code`: reads that of now, by which a change that was undone is left out; None: it is not known.
    """
    counts = store.fingerprint_counts(sweep_id)
    if cells:
        ids = {row.id for row in store.cells(sweep_id) if row.cell.key in cells}
        counts = [one for one in counts if one.cell_id in ids]
    digests = {one.digest for one in counts if one.newest_attempt_id is not None}
    if not any(one.num_apart or one.num_earlier for one in counts) and (
        not across_cells or len(digests) < 2
    ):
        return []
    known, now = store.fingerprints(sweep_id), code() if code is not None else None
    if now is not None:
        counts = _without_undone(counts, known, now)
    return changes_of(sweep, counts, known, across_cells=across_cells, cells=cells, now=now)


def _without_undone(
    counts: Iterable[FingerprintCounts], fingerprints: Iterable[Fingerprint], now: Fingerprint
) -> list[FingerprintCounts]:
    """Leave out repeats of other code than that of now, in cells whose numbers have the latter."""
    has_code = {one.digest: one.has_code_of(now) for one in fingerprints}
    return [
        replace(one, num_apart=0, apart_digest=None)
        if has_code.get(one.digest or "") and has_code.get(one.apart_digest or "") is False
        else one
        for one in counts
    ]


def other_cells_than(cells: Collection[str], store: StoreReads, sweep_id: int) -> bool:
    """Return whether a sweep has other cells than these, by their keys."""
    return any(row.cell.key not in cells for row in store.cells(sweep_id))


@dataclass(frozen=True, kw_only=True)
class SweepChanges:
    """What changed within the cells of a sweep: of all of them, and of each that changed."""

    of_sweep: Sequence[SoftwareChange] = ()
    by_cell: Mapping[int, Sequence[SoftwareChange]] = field(default_factory=dict)  # by cell id


def sweep_changes(store: StoreReads, sweep: SweepRow) -> SweepChanges:
    """Read what changed within the cells of a sweep."""
    counts = store.fingerprint_counts(sweep.id)
    changed = [one for one in counts if one.num_earlier or one.num_apart]
    if not changed:
        return SweepChanges()
    known = store.fingerprints(sweep.id)
    return SweepChanges(
        of_sweep=changes_of(sweep.name, counts, known),
        by_cell={one.cell_id: changes_of(sweep.name, [one], known) for one in changed},
    )


def changes_of(
    sweep: str,
    counts: Sequence[FingerprintCounts],
    fingerprints: Iterable[Fingerprint],
    *,
    across_cells: bool = False,
    cells: Collection[str] = (),
    now: Fingerprint | None = None,
) -> list[SoftwareChange]:
    """Say what changed in some cells of a sweep. `across_cells`: also if only they differ.

    `cells`: the keys of the cells that the commands act on; empty: all. `now`: the code of now;
    None: it is not known.
    """
    known = {one.digest: one for one in fingerprints}
    again = partial(invalidate_command, sweep, cells=cells)
    measured = [one for one in counts if one.newest_attempt_id is not None]
    found = []
    if now is not None and measured and (undone := _undone(again, measured, known, now)):
        found.append(undone)
        counts = _without_other_code(counts, known, now)
    if apart := [one for one in counts if one.num_apart]:
        found.append(_kept_apart(again, apart, known))
    if any(one.num_earlier for one in counts):
        found.append(_earlier(again, counts, known))
    if across_cells and not found and len({one.digest for one in measured}) > 1:
        found.append(_across_cells(again, measured, known))
    return found


def invalidate_command(sweep: str, condition: str, *, cells: Collection[str] = ()) -> str:
    """Return the command that has trials of a sweep measured again.

    `cells`: the keys of the cells that it acts on; empty: all.
    """
    if cells:
        condition += f" and cell {_among(sorted(cells))}"
    quote = '"' if "'" in condition else "'"
    return f"sweep invalidate --sweep {sweep} --where {quote}{condition}{quote} --yes"


def _kept_apart(
    again: Callable[[str], str], apart: Sequence[FingerprintCounts], known: dict[str, Fingerprint]
) -> SoftwareChange:
    text, is_of_code = _changed(apart[-1].digest, apart[-1].apart_digest, known)
    num = sum(one.num_apart for one in apart)
    what = _what(is_of_code=is_of_code)
    return SoftwareChange(
        text=(
            f"No more repeats were made: the {'program' if is_of_code else 'software'} has"
            f" changed{text}. {show.counted(num, 'repeat')} of the new {what}"
            f" {'is' if num == 1 else 'are'} not counted. The ranking is that of the earlier {what}"
        ),
        command=again(_with([one.digest for one in apart])),
        is_of_code=is_of_code,
        is_apart=True,
    )


def _what(*, is_of_code: bool) -> str:
    return "code" if is_of_code else "software"


def _earlier(
    again: Callable[[str], str], counts: Sequence[FingerprintCounts], known: dict[str, Fingerprint]
) -> SoftwareChange:
    last = [one for one in counts if one.num_earlier][-1]
    text, is_of_code = _changed(last.earlier[-1][0], last.digest, known)
    current = sum(one.num_current for one in counts)
    earlier = sum(one.num_earlier for one in counts)
    return SoftwareChange(
        text=(
            f"Of {show.counted(current + earlier, 'measured layout')}, {current:,}"
            f" {'has' if current == 1 else 'have'} numbers with the newest code, software and"
            f" device, {earlier:,} with an earlier one{text}"
        ),
        command=again("not is_current_fingerprint"),
        is_of_code=is_of_code,
    )


def _undone(
    again: Callable[[str], str],
    counts: Sequence[FingerprintCounts],
    known: dict[str, Fingerprint],
    now: Fingerprint,
) -> SoftwareChange | None:
    """Return the change if an edit gave the newest numbers and was undone; None: it was not."""
    newest = max(counts, key=lambda one: one.newest_attempt_id or 0).digest or ""
    nums = Counter[str]()
    for cell in counts:
        for digest, num in (*cell.earlier, (cell.digest, cell.num_current)):
            nums[digest or ""] += num
    ours = {digest for digest in nums if digest in known and known[digest].has_code_of(now)}
    others = [digest for digest in nums if digest in known and digest not in ours]
    if not ours or newest not in others:
        return None
    num, total = sum(nums[digest] for digest in others), nums.total()
    # The least change shows what was edited, without what else differs between cells.
    what = min((_changed(before, newest, known)[0] for before in sorted(ours)), key=len)
    return SoftwareChange(
        text=(
            f"Of {show.counted(total, 'measured layout')}, {num:,} {'has' if num == 1 else 'have'}"
            f" numbers of other code than that of now{what}: it was changed back"
        ),
        command=again(_with(others)),
        is_of_code=True,
        is_undone=True,
    )


def _without_other_code(
    counts: Iterable[FingerprintCounts], known: dict[str, Fingerprint], now: Fingerprint
) -> list[FingerprintCounts]:
    """Leave out the numbers of other code than that of now, and cells that have it at last."""
    other = {digest for digest, one in known.items() if not one.has_code_of(now)}
    return [
        replace(one, earlier=tuple(pair for pair in one.earlier if pair[0] not in other))
        for one in counts
        if one.digest not in other
    ]


def _across_cells(
    again: Callable[[str], str],
    measured: Sequence[FingerprintCounts],
    known: dict[str, Fingerprint],
) -> SoftwareChange:
    newest = max(measured, key=lambda one: one.newest_attempt_id or 0)
    others = [one for one in measured if one.digest != newest.digest]
    were = "was" if len(others) == 1 else "were"
    text, is_of_code = _changed(others[-1].digest, newest.digest, known)
    return SoftwareChange(
        text=(
            f"Of {show.counted(len(measured), 'cell')}, {len(others):,} {were} measured with other"
            f" code, software or device than the newest{text}"
        ),
        command=again(_with([one.digest for one in others])),
        is_of_code=is_of_code,
    )


def _changed(
    before: str | None, after: str | None, known: dict[str, Fingerprint]
) -> tuple[str, bool]:
    """Return what changed, in brackets, and whether code did."""
    from orchestrator.core.trial.fingerprint import changes  # pydantic, 0.05 s

    old, new = known.get(before or ""), known.get(after or "")
    if old is None or new is None:
        return "", False
    text = changes(old, new)
    return f" ({text})" if text else "", not old.has_code_of(new)


def _with(digests: Iterable[str | None]) -> str:
    """Return the condition that finds the numbers with these fingerprints."""
    return (
        f"fingerprint_digest {_among([one for one in dict.fromkeys(digests) if one is not None])}"
    )


def _among(values: Sequence[str]) -> str:
    quoted = [f"'{one}'" for one in values]
    return f"= {quoted[0]}" if len(quoted) == 1 else f"in ({', '.join(quoted)})"
