"""An edit is noticed, once."""

from __future__ import annotations

from pathlib import Path

from orchestrator.sweep.watched_files import WatchedFiles


def test_an_edited_removed_or_replaced_file_is_noticed_once(tmp_path: Path) -> None:
    edited, removed, replaced = (tmp_path / name for name in ("a.py", "b.py", "c.py"))
    for file in (edited, removed, replaced):
        file.write_text("x = 1\n")
    watched = WatchedFiles([edited, removed, replaced])
    assert not watched.have_changed()
    edited.write_text("x = 10\n")
    assert watched.have_changed() and not watched.have_changed()
    removed.unlink()
    assert watched.have_changed() and not watched.have_changed()
    (tmp_path / "new").write_text("x = 2\n")
    (tmp_path / "new").rename(replaced)
    assert watched.have_changed() and not watched.have_changed()
