"""Users as container runtimes look them up, whatever the files of the sandbox are."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.guest import users
from sandboxes.guest.users import UnknownUserError, User
from tests.sandboxes.box import needs_root

PASSWD = [
    "root:x:0:0:root:/root:/bin/sh",
    "ann:x:1000:100:Ann:/home/ann:/bin/sh",
    "ann:x:7:7::/other:",
    "twin:x:1000:8::/twin:",
    "1000:x:0:0::/trap:",
    "homeless:x:1001:101:::",
    "short:x:1002",
    "none:x::",
    "minus:x:-1:0::/:",
    "plus:x:+5:0::/:",
    "huge:x:4294967295:0::/:",
    "far:x:99999999999999999999:0::/:",
    "arabic:x:\u0661:0::/:",
    "",
    ":::::",
]
GROUP = [
    "root:x:0:",
    "staff:x:50:ann,bob",
    "wheel:x:51:bob,ann",
    "staff:x:52:",
    "60:x:61:",
    "odd:x:y:ann",
    "more:x:50:ann",
]
KNOWN = {
    "": User(0, 0, (0,), "/root", "root"),
    "0": User(0, 0, (0,), "/root", "root"),
    "root": User(0, 0, (0,), "/root", "root"),
    "ann": User(1000, 100, (100, 50, 51), "/home/ann", "ann"),
    "1000": User(1000, 100, (100, 50, 51), "/home/ann", "ann"),
    "01000": User(1000, 100, (100, 50, 51), "/home/ann", "ann"),
    "twin": User(1000, 8, (8,), "/twin", "twin"),
    "homeless": User(1001, 101, (101,), "/", "homeless"),
    "short": User(1002, 0, (0,), "/", "short"),
    "5000": User(5000, 0, (0,), "/"),
    "4294967294": User(4294967294, 0, (0,), "/"),
    "1000:1000": User(1000, 1000, (1000,), "/home/ann", "ann"),
    "ann:staff": User(1000, 50, (50,), "/home/ann", "ann"),
    "5000:staff": User(5000, 50, (50,), "/"),
    "ann:60": User(1000, 60, (60,), "/home/ann", "ann"),
    "ann:": User(1000, 100, (100, 50, 51), "/home/ann", "ann"),
    ":staff": User(0, 50, (50,), "/root", "root"),
}
UNKNOWN = [
    "nobody-here",
    "4294967295",
    "99999999999999999999",
    "-1",
    "+5",
    "none",
    "minus",
    "plus",
    "huge",
    "far",
    "arabic",
]
UNKNOWN += ["ann:nothing", "ann:4294967295", "ann:odd", "ann:x:50", "nobody-here:staff", " ann", "\u0661"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_user_is_what_container_runtimes_take_it_for(name: str) -> None:
    """A number is never a name, the first line counts, and a group that is named is the only one."""
    assert users.resolve(name, PASSWD, GROUP) == KNOWN[name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_user_without_a_number_is_unknown(name: str) -> None:
    """The kernel's highest number means "no change", so no user has it."""
    with pytest.raises(UnknownUserError, match=r"unable to find (user|group) .*: no matching entries in"):
        users.resolve(name, PASSWD, GROUP)


def test_a_user_has_no_more_groups_than_a_request_takes() -> None:
    groups = [f"g{number}:x:{number}:ann" for number in range(200, 2000)]
    user = users.resolve("ann", PASSWD, groups)
    assert user.groups == (100, *range(200, 1223))


@given(st.text(), st.lists(st.text(), max_size=5), st.lists(st.text(), max_size=5))
def test_any_files_give_a_user_or_none(name: str, passwd: list[str], group: list[str]) -> None:
    try:
        user = users.resolve(name, passwd, group)
    except UnknownUserError:
        return
    assert all(0 <= number < 2**32 - 1 for number in (user.uid, user.gid, *user.groups))


def linked(path: Path, to: str) -> None:
    path.symlink_to(to)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "missing": lambda _: None,
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to itself": lambda path: linked(path, "passwd"),
    "a link to this process": lambda path: linked(path, "/proc/self/environ"),
    "a link out of the root": lambda path: linked(path, "../../../../etc/passwd"),
    "a terminal": lambda path: linked(path, "/dev/tty"),
    "binary": lambda path: path.write_bytes(os.urandom(1 << 20)),
    "100 MB": lambda path: path.write_bytes(b"x:y:z\n" * (100 << 20 >> 2 >> 1)),
    "100 MB in one line": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 100 << 20),
}
"""What /etc/passwd may be, by name: a function that makes it."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_read_quickly_and_name_no_user(tmp_path: Path, name: str) -> None:
    (tmp_path / "etc").mkdir()
    HOSTILE[name](tmp_path / "etc/passwd")
    began = time.process_time()
    with pytest.raises(UnknownUserError):
        users.read("daemon", str(tmp_path))
    assert users.read("1:2", str(tmp_path)) == User(1, 2, (2,), "/")
    assert time.process_time() - began < 2.0


def test_links_lead_within_the_root(tmp_path: Path) -> None:
    """So they do in the root of a side service, which is a directory of the sandbox."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to("/users")
    (tmp_path / "users").write_text("daemon:x:77:78::/d:\n")
    assert users.read("daemon", str(tmp_path)) == User(77, 78, (78,), "/d", "daemon")


@needs_root
def test_a_link_to_another_file_system_is_not_followed(tmp_path: Path) -> None:
    """/proc has what this process may read and the agent's processes may not."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to("/proc/passwd")
    (tmp_path / "proc").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path / "proc"], check=True)
    try:
        (tmp_path / "proc/passwd").write_text("someone:x:9:9::/:\n")
        with pytest.raises(UnknownUserError):
            users.read("someone", str(tmp_path))
    finally:
        subprocess.run(["umount", tmp_path / "proc"], check=True)


@pytest.mark.parametrize("text", ["Åsa", "a\x0bb", "a\rb", "\x1c", "\u2028"])
def test_a_line_ends_with_a_line_feed_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(f"someone:x:9:9:{text}:/home/someone:\n", encoding="utf-8", newline="")
    assert users.read("someone", str(tmp_path)).home == "/home/someone"


def test_a_line_that_is_cut_off_is_no_user(tmp_path: Path) -> None:
    """Its number would be that of another user."""
    (tmp_path / "etc").mkdir()
    with (tmp_path / "etc/passwd").open("w") as file:
        file.write("x" * ((1 << 20) - len("\nsomeone:x:10")) + "\nsomeone:x:1000:1000::/:\n")
    with pytest.raises(UnknownUserError):
        users.read("someone", str(tmp_path))
