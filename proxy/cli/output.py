"""How commands print: as text for people, or as the proxy's JSON."""

from collections.abc import Callable
from typing import Any, TextIO

import orjson
import typer
from rich.console import Console, RenderableType

from proxy.cli.text import printable


def show(view: Any, render: Callable[[Any], RenderableType], *, json: bool) -> None:
    """Print a response of the proxy, rendered or as JSON."""
    if json:
        typer.echo(orjson.dumps(view, option=orjson.OPT_INDENT_2))
    else:
        Console().print(render(view))


def write_text(text: str, stream: TextIO) -> None:
    """Write the output of a tool: as it is into a file or pipe, escaped line by line on a terminal."""
    if stream.isatty():
        text = "".join(f"{printable(line)}\n" for line in text.splitlines())
    # Output of tools may hold lone surrogates, which no encoding writes.
    stream.write(text.encode(errors="replace").decode())
    stream.flush()
