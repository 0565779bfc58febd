"""Progress of long operations: bars on stderr, and only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from proxy.address import TOTAL
from proxy.cli.client import fail

CHUNK = 1 << 20
"""Bytes that are moved at a time."""


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return the display of an operation's progress. Files and pipes see nothing of it."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


@contextmanager
def bytes_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts bytes, of about `total`; None if that is not known."""
    with _bar(title, total, DownloadColumn()) as advance:
        yield advance


@contextmanager
def items_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts items; see `bytes_bar`."""
    with _bar(title, total, MofNCompleteColumn()) as advance:
        yield advance


@contextmanager
def _bar(title: str, total: int | None, amount: ProgressColumn) -> Iterator[Callable[[int], None]]:
    with progress_bar(TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn()) as progress:
        bar = progress.add_task(title, total=total)

        def advance(count: int) -> None:
            progress.update(bar, advance=count)

        yield advance
        # The total may have been an estimate.
        progress.update(bar, total=progress.tasks[0].completed)


def total_of(response: httpx.Response) -> int | None:
    """Return how many bytes or items a response will have, as the proxy says; None if it does not."""
    total = response.headers.get("content-length", response.headers.get(TOTAL, ""))
    return int(total) if total.isdecimal() else None


def download(response: httpx.Response, file: Path, title: str) -> int:
    """Write a response to a private file, which appears whole, or to stdout for `-`; return its bytes."""
    draft, size = file.with_name(f"{file.name}.part"), 0
    try:
        with _writing(file, draft) as write, bytes_bar(title, total_of(response)) as advance:
            for chunk in response.iter_bytes(CHUNK):
                write(chunk)
                size += len(chunk)
                advance(len(chunk))
        if str(file) != "-":
            draft.rename(file)
    except BrokenPipeError:
        # The reader of stdout has ended, as `head` does. Typer then ends the command without a word.
        raise
    except OSError as error:
        fail(f"{file} cannot be written: {error}. Choose another file.")
    finally:
        if str(file) != "-":
            draft.unlink(missing_ok=True)
    return size


@contextmanager
def _writing(file: Path, draft: Path) -> Iterator[Callable[[bytes], object]]:
    if str(file) == "-":
        yield typer.get_binary_stream("stdout").write
        return
    draft.touch(mode=0o600)
    with draft.open("wb") as output:
        yield output.write
