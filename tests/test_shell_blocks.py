"""Every block of shell commands in the documentation is run, or says in the page's source why not; all are parsed.

A line above a block, which readers do not see, says what happens to it:

    <!-- run by tests/test_readme.py -->     another test runs it; that file names the page
    <!-- not run: needs Docker -->           its calls of `forkpoint` are parsed with the real argument parser

All other blocks are run here, page by page, against one proxy. Their `forkpoint serve` is parsed only, because that
proxy stands in for it.
"""

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import typer

from forkpoint.ephemeral_proxy import free_port
from proxy.cli.commands import _COMMANDS, _OFFLINE
from proxy.cli.main import app
from tests.machine import require_curl, require_sandboxes
from tests.test_readme import serving

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("bench/*.md")])
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]+?) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
SHELL = {"sh", "bash", "shell", "console"}
PARSER = typer.main.get_command(app)
COMMANDS: set[str] = set(PARSER.commands)  # type: ignore[attr-defined]
UsageError = typer.BadParameter.__mro__[1]
"""Typer has a copy of click and exports only some of its errors."""
OF_CHECKOUT = {"test", "check", "docs", "wheel"}
"""What `./run` does beside the commands of `forkpoint`."""
OPERATORS = {"|", "||", "&&", ";", "&", "(", ")"}
PROGRAM = re.compile(r"(\w+=\S* +)*(\./run|curl|docker|export|forkpoint|helm|kubectl|pip|python3?|uv) ")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the mark and the text of each block of shell commands; the mark is empty if there is none."""
    for match in BLOCK.finditer(page.read_text()):
        if match["language"] in SHELL:
            yield match["mark"] or "", match["text"].replace("\\\n", " ")


def calls(text: str) -> Iterator[list[str]]:
    """Yield the words of each call of `forkpoint` in shell commands."""
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in (*lexer, ";"):
            if word not in OPERATORS:
                words.append(word)
                continue
            yield from call_of(words)
            words = []


def call_of(words: list[str]) -> Iterator[list[str]]:
    """Yield the call in one command: after assignments, or as the program that another program starts."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    for at, word in enumerate(words):
        is_program = word == "./run" or word.rpartition("/")[2] == "forkpoint"
        if is_program and (at == 0 or COMMANDS.intersection(words[at + 1 : at + 2])):
            yield words[at + 1 :]
            return


def parse_all(text: str) -> None:
    """Parse every call of `forkpoint` in shell commands; see `parse`."""
    for words in calls(text):
        parse(words)


def parse(words: list[str], *, whole: bool = True) -> None:
    """Parse a call as the program does, without running it.

    Args:
        words: The words after the name of the program.
        whole: Whether it must have all its arguments. A sentence may name a command without them.

    Raises:
        UsageError: There is no such command, option or argument.
    """
    if words[0] in OF_CHECKOUT:
        return
    if words[0].startswith("-"):
        # Not parsed: such options act at once.
        assert words[0] in {option for parameter in PARSER.params for option in parameter.opts} | {"--help"}, words
        return
    with PARSER.make_context("forkpoint", list(words)) as context:
        name, command, rest = PARSER.resolve_command(context, words)  # type: ignore[attr-defined]
        try:
            command.make_context(name, [word for word in rest if word != "--help"], parent=context)
        except typer.BadParameter as error:
            # Files that an example reads are not here.
            is_missing = type(error).__name__ == "MissingParameter"
            if "does not exist" not in error.message and (whole or not is_missing):
                raise


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A proxy with the rollouts that the pages speak of, and a folder with their files."""
    require_sandboxes()
    require_curl()
    folder, port = tmp_path_factory.mktemp("pages"), free_port()
    (folder / ".curlrc").write_text("fail-with-body\n")
    with closing(sqlite3.connect(folder / "chinook.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE Album (AlbumId INTEGER)")
    with serving("./run serve", folder, port):
        begin = f"http://127.0.0.1:{port}/api/v1/tasks/demo/rollouts"
        rollout = json.dumps({"rollout": "1", "labels": {"run": "r7"}})
        shell = f"http://127.0.0.1:{port}/t/%s/r/1/shell/exec"
        made = f"curl -s {begin} -d '{rollout}'" + "".join(
            f'\ncurl -s {shell % task} -d \'{{"command": "echo built > app"}}\'' for task in ("demo", "first")
        )
        run(made, folder, port)
        yield folder, port


def run(text: str, folder: Path, port: int) -> None:
    """Run shell commands with the addresses and files of `place`; the first that fails ends them."""
    for written, actual in (("127.0.0.1:8700", f"127.0.0.1:{port}"), ("/data/", f"{folder}/")):
        text = text.replace(written, actual)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "FORKPOINT_URL": f"http://127.0.0.1:{port}",
        "CURL_HOME": str(folder),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-ec", text], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


RUN_HERE = [page for page in PAGES if any(not mark for mark, _ in blocks(page))]


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_of_page_run(page: Path, place: tuple[Path, int]) -> None:
    for mark, text in blocks(page):
        if not mark:
            lines = [line for line in text.splitlines() if not any(words[0] == "serve" for words in calls(line))]
            run("\n".join(lines), *place)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_blocks_are_marked_and_parse(page: Path) -> None:
    for mark, text in blocks(page):
        parse_all(text)
        kind, _, rest = mark.partition(" ") if mark.startswith("run by ") else mark.partition(": ")
        if kind == "run":
            runner = REPOSITORY / rest.removeprefix("by ")
            lines = text.splitlines()
            assert page.name in runner.read_text() or all(line in runner.read_text() for line in lines), rest
        else:
            assert kind in ("", "not run"), mark
            assert (kind == "") == (rest == ""), f"{mark} lacks a reason"
    # Commands in a block without a language would escape all this.
    plain = [match["text"] for match in BLOCK.finditer(page.read_text()) if not match["language"]]
    summary = page.name == "cli.md"
    assert summary or not [line for text in plain for line in text.splitlines() if PROGRAM.match(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_in_sentences_parse(page: Path) -> None:
    for span in re.findall(r"`((?:\./run|forkpoint) [^`]+)`", page.read_text()):
        for words in calls(re.sub(r"[\[\]…]", "", span).replace("TURN", "1")):
            if words and words[0] != "COMMAND":
                parse(words, whole=False)


def test_examples_of_help_parse() -> None:
    for _, _, _, example in (*_COMMANDS, *_OFFLINE):
        (words,) = calls(example)
        parse(words)


def test_summary_names_every_command() -> None:
    """The first block of the page of commands, and the options that its sections name."""
    page = (REPOSITORY / "docs" / "cli.md").read_text()
    summary = page.split("```")[1]
    assert set(re.findall(r"[a-z]+", summary)) >= COMMANDS
    for section in page.split("\n## ")[1:]:
        named = re.findall(r"`forkpoint (\w+)", section.splitlines()[0])
        known = {option for name in named for parameter in PARSER.commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
        if named:
            assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", section)) <= known | {"--help"}, section


@pytest.mark.parametrize(
    "text",
    [
        "forkpoint tre demo",
        "forkpoint tree demo --nod n3",
        "A=1 forkpoint tree",
        "x=$(ls) forkpoint serve --prot 1 &",
        "srun --overlap forkpoint serve --prt 1",
        "forkpoint tree demo | forkpoint tre",
    ],
)
def test_wrong_command_is_found(text: str) -> None:
    with pytest.raises(UsageError):
        parse_all(text)
