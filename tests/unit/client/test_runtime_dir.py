"""The private folder of an engine: who may remove it, and when."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asyncllm.client import runtime_dir
from asyncllm.client.runtime_dir import RuntimeDir, sweep


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCLLM_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def stale_folder(parent: Path, *, owner: int, age_s: float = 0.0) -> Path:
    """Make a folder as a dead owner leaves it: nobody holds its lock."""
    path = parent / f"asyncllm-{owner}-abc"
    path.mkdir(mode=0o700)
    (path / "lock").touch()
    (path / "engine.log").write_text("last words")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
    return path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_folder_is_private_and_gone_after_remove(parent: Path) -> None:
    folder = RuntimeDir.create()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.path.parent == parent
    folder.remove()
    folder.remove()
    assert list(parent.iterdir()) == []


def test_r30_folder_of_a_dead_owner_is_swept(parent: Path) -> None:
    stale_folder(parent, owner=dead_pid())
    sweep(parent)
    assert list(parent.iterdir()) == []


def test_folder_of_a_living_owner_is_kept(parent: Path) -> None:
    folder = RuntimeDir.create()
    os.utime(folder.path, (0, 0))  # however old
    sweep(parent)
    assert folder.path.is_dir()
    folder.remove()


def test_reused_process_id_does_not_keep_a_stale_folder(parent: Path) -> None:
    stale_folder(parent, owner=os.getpid(), age_s=runtime_dir.NEWBORN_S + 1)
    sweep(parent)
    assert list(parent.iterdir()) == []


def test_folder_that_is_about_to_be_locked_is_kept(parent: Path) -> None:
    path = stale_folder(parent, owner=os.getpid())
    (path / "lock").unlink()
    sweep(parent)
    assert path.is_dir()


def test_only_our_own_folders_are_swept(parent: Path) -> None:
    (parent / "asyncllm-tools").mkdir()
    (parent / "asyncllm-12x-abc").mkdir()
    (parent / f"asyncllm-{dead_pid()}-file").touch()
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (parent / f"asyncllm-{dead_pid()}-link").symlink_to(elsewhere)
    before = sorted(parent.iterdir())
    sweep(parent)
    assert sorted(parent.iterdir()) == before


def test_folder_of_another_user_is_kept(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stale_folder(parent, owner=dead_pid())
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    sweep(parent)
    assert path.is_dir()


def test_sweep_of_a_missing_parent_is_quiet(tmp_path: Path) -> None:
    sweep(tmp_path / "missing")


def test_fork_does_not_remove_its_parents_folder(parent: Path) -> None:
    folder = RuntimeDir.create()
    folder._owner += 1  # as a forked child sees it
    folder.remove()
    assert folder.path.is_dir()
    folder._owner -= 1
    folder.remove()


def test_log_tail_is_the_last_lines(parent: Path) -> None:
    folder = RuntimeDir.create()
    assert folder.log_tail() == ""
    (folder.path / "engine.log").write_bytes(b"x" * 10_000 + b"\n" + b"".join(b"line %d\n" % i for i in range(50)))
    assert folder.log_tail(num_lines=3) == "line 47\nline 48\nline 49"
    (folder.path / "engine.log").write_bytes(b"\xff broken")
    assert folder.log_tail() == "\ufffd broken"
    folder.remove()
