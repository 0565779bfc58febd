"""How commands print: as text for people, or as the proxy's JSON."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement

from proxy.cli.text import printable

_PIPE_CHARS = 1 << 16
"""Width of a file or pipe in characters, which no row of a table reaches."""
_UNSAFE = re.compile(r"[^\n\x20-\x7e]")
"""Matches what `json` writes as it is and a terminal may obey: C1 controls and direction marks, among letters."""


def show(view: Any, render: Callable[[Any], RenderableType], *, json: bool) -> None:
    """Print a response of the proxy, rendered or as JSON."""
    if json:
        print_json(view)
    else:
        rendered = render(view)
        output_console(rendered).print(rendered)


def output_console(rendered: RenderableType = "") -> Console:
    """Return the console of stdout. Where that is no terminal, nothing is cut, unless COLUMNS says a width."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_CHARS
        # Trees fill the width: all of it would be blanks.
        console.width = max(1, Measurement.get(console, console.options, rendered).maximum) if rendered else _PIPE_CHARS
    return console


def print_json(view: Any, *, beside: Path | None = None, one_line: bool = False) -> None:
    """Print a view as JSON: what every command does with `--json`, to stderr if `beside`, a file, is `-`."""
    style: Any = {"separators": (",", ":")} if one_line else {"indent": 2}
    text = _UNSAFE.sub(_escaped, json.dumps(view, ensure_ascii=False, default=asdict, **style))
    typer.echo(text, err=beside is not None and str(beside) == "-")


def _escaped(sign: re.Match[str]) -> str:
    """Return a character of a JSON text as it is, or as an escape of JSON if it may control a terminal."""
    return sign[0] if sign[0].isprintable() else json.dumps(sign[0])[1:-1]


def write_text(text: str, stream: TextIO) -> None:
    """Write the output of a tool: as it is into a file or pipe, escaped line by line on a terminal."""
    if stream.isatty():
        text = "".join(f"{printable(line)}\n" for line in text.splitlines())
    # Output of tools may hold lone surrogates, which no encoding writes.
    stream.write(text.encode(errors="replace").decode())
    stream.flush()
