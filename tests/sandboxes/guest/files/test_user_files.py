"""File operations as a user of the sandbox, whatever the agent has made of /etc/passwd."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxes.guest import users
from sandboxes.guest.files import user_files


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory /etc of the sandbox."""
    (tmp_path / "etc").mkdir()
    monkeypatch.setattr(users.read, "__defaults__", (str(tmp_path),))
    monkeypatch.setattr(users.name_of, "__defaults__", (str(tmp_path),))
    return tmp_path / "etc"


def info(path: Path, user: str) -> tuple[int, dict[str, Any]]:
    status, _, body = user_files.perform("info", {"path": str(path), "user": user}, lambda _: (500, "", b""))
    return status, json.loads(body)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/proc/self/environ")])
def test_a_hostile_file_of_users_names_nobody(etc: Path, make: Callable[[Path], object]) -> None:
    """A FIFO would be waited for without an end."""
    make(etc / "passwd")
    make(etc / "group")
    assert info(etc, "root")[0] == 401
    status, entry = info(etc, "")
    assert (status, entry["owner"], entry["group"]) == (200, str(os.geteuid()), str(os.getegid()))
    assert user_files.home() == "/"


@pytest.mark.parametrize("user", ["5000", "\u00c5sa:staff", "nobody-here", "\ud800"])
def test_a_user_without_a_line_is_refused(etc: Path, user: str) -> None:
    (etc / "passwd").write_text(f"\u00c5sa:x:{os.geteuid()}:0::/home/\u00c5sa:\n", encoding="utf-8")
    assert info(etc, user)[0] == 401


def test_names_are_utf8(etc: Path) -> None:
    (etc / "passwd").write_text(f"\u00c5sa:x:{os.geteuid()}:0::/home/\u00c5sa:\n", encoding="utf-8")
    (etc / "group").write_bytes(b"\xc5:x:%d:\n" % os.getegid())
    status, entry = info(etc, "\u00c5sa")
    assert (status, entry["owner"], entry["group"]) == (200, "\u00c5sa", "\ufffd")
    assert user_files.home() == "/home/\u00c5sa"
