"""Lines that run a command in a shell of its own: what bash makes of them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forkpoint.own_shell import line_of

HOSTILE = "a b'c\"d$(touch owned)`touch owned`\n\\;&|*~é"


def bash(line: str, where: Path) -> str:
    done = subprocess.run(["bash", "-c", f"{line}; pwd"], cwd=where, capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        (["printf", "%s", HOSTILE], {}),
        (["printenv", "WORD"], {"env": {"WORD": HOSTILE}}),
        (["cat"], {"stdin": HOSTILE.encode()}),
    ],
)
def test_no_part_of_a_line_is_expanded(tmp_path: Path, argv: list[str], more: dict[str, Any]) -> None:
    output = bash(line_of(argv, **more), tmp_path)
    assert output.replace("\n", "") == HOSTILE.replace("\n", "") + str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_command_leaves_its_session_alone(tmp_path: Path) -> None:
    """Directory, standard input and exit belong to the command."""
    (tmp_path / "a b").mkdir()
    line = line_of(["sh", "-c", "pwd; cat; exit 3"], cwd="a b", stdin=b"\0\xff\n\n")
    done = subprocess.run(["bash", "-c", f"{line}; echo $?; pwd"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == f"{tmp_path}/a b\n\0\xff\n\n3\n{tmp_path}\n".encode("latin-1")


def test_input_is_empty_unless_given(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("from a file")
    assert bash(line_of(["cat"]), tmp_path) == bash(line_of(["cat"], stdin=b""), tmp_path) == f"{tmp_path}\n"
    assert bash(line_of(["cat"], stdin_path="in"), tmp_path) == f"from a file{tmp_path}\n"


@pytest.mark.parametrize("shell", ["bash --posix", "dash", "busybox sh"])
def test_line_for_any_shell(tmp_path: Path, shell: str) -> None:
    """Bytes of any kind reach the program, also such as `printf` reads as options or formats."""
    if shutil.which(shell.split(maxsplit=1)[0]) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "a b").mkdir()
    for content in (bytes(range(256)), b"-n %s\\101'", HOSTILE.encode(), b""):
        line = line_of(
            ["sh", "-c", "cat; echo $WORD; pwd; exit 3"], cwd="a b", env={"WORD": "it's"}, stdin=content, posix=True
        )
        command = [*shell.split(), "-c", f"{line}; echo $?"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        assert done.stdout == content + f"it's\n{tmp_path}/a b\n3\n".encode()
    assert list(tmp_path.iterdir()) == [tmp_path / "a b"]


@pytest.mark.parametrize("user", ["root", "0"])
def test_shell_of_root_needs_no_runuser(tmp_path: Path, user: str) -> None:
    """Small images have none. The session's own arguments reach no command."""
    line = line_of(["printf", "%s|", "a b", "c"], user=user).replace("/usr/sbin/runuser", "no-runuser")
    done = subprocess.run(["bash", "-c", f'set -- x; {line}; echo "$1"'], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == (b"a b|c|x\n" if os.geteuid() == 0 else b"x\n")
