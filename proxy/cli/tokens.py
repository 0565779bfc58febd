"""Tokens of people and teams: lines of the token file, which a running proxy reads again when it has changed."""

import os
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from proxy.cli.client import fail
from proxy.cli.options import JsonOption
from proxy.cli.output import print_json
from proxy.cli.text import printable

_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTP]?i?B|[kMGTP])", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def token(
    action: Annotated[
        Literal["list", "create", "revoke"],
        typer.Argument(help="List the tokens of a file, create one, or revoke one."),
    ],
    name: Annotated[str | None, typer.Argument(help="Name of the person or team.", metavar="NAME")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="Tasks that it sees, such as 'alice-*'. Repeatable.", show_default="all"),
    ] = None,
    *,
    disk: Annotated[
        str | None, typer.Option(help="Most disk for kept states of these tasks, such as 10G.", show_default="no limit")
    ] = None,
    file: Annotated[
        Path, typer.Option("--file", envvar="FORKPOINT_TOKEN_FILE", help="The proxy's token_file.", dir_okay=False)
    ],
    json: JsonOption = False,
) -> None:
    """Create, list and revoke the tokens of a token file. A proxy with this file needs no restart."""
    try:
        if action == "list":
            _show(_lines(file), json=json)
            return
        if name is None or _NAME.fullmatch(name) is None:
            fail(f"`forkpoint token {action}` needs a name: 1 to 64 of A-Z a-z 0-9 . _ - and no sign first.")
        if action == "create":
            named = any(pattern.startswith("disk=") for pattern in tasks or [])
            if named or (disk and not (tasks and _SIZE.fullmatch(disk))):
                fail("--disk takes a size such as 10G, and needs --tasks: it bounds what the states of these take.")
            _create(file, name, [*([f"disk={disk}"] if disk else []), *(tasks or [])], json=json)
        else:
            _revoke(file, name, json=json)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"The token file {file} cannot be used: {error}")


def _create(file: Path, name: str, fields: list[str], *, json: bool) -> None:
    if any(not field or field[0] in "@#" or field.split() != [field] for field in fields):
        fail("--tasks takes the name of a task or a pattern without spaces, such as 'alice-*'.")
    lines = _lines(file) if file.exists() else []
    if any(_name(line) == name for line in lines):
        fail(f"There is a token of {name}. Revoke it, or choose another name.")
    secret = secrets.token_hex(24)
    line = " ".join([f"sha256:{sha256(secret.encode()).hexdigest()}", f"@{name}", *fields])
    _write(file, [*lines, line])
    if json:
        print_json(_view(line) | {"token": secret})
    else:
        typer.echo(secret)
        typer.echo("This is the only time that the token is shown; the file has its digest.", err=True)


def _revoke(file: Path, name: str, *, json: bool) -> None:
    lines = _lines(file)
    kept = [line for line in lines if _name(line) != name]
    if len(kept) == len(lines):
        fail(f"There is no token of {name} in {file}.")
    _write(file, kept)
    if json:
        print_json({"name": name, "revoked": len(lines) - len(kept)})


def _show(lines: list[str], *, json: bool) -> None:
    views = [_view(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if json:
        print_json(views)
        return
    for view in views:
        disk = f"  (at most {view['disk']} of kept states)" if view["disk"] else ""
        typer.echo(printable(f"{view['name'] or '(no name)':20} {' '.join(view['tasks']) or 'all tasks'}{disk}"))


def _view(line: str) -> dict[str, Any]:
    """Return the name, tasks and limit of the disk in a line of the file."""
    fields = [field for field in line.split()[1:] if not field.startswith("@")]
    disk = fields.pop(0).removeprefix("disk=") if fields and fields[0].startswith("disk=") else None
    return {"name": _name(line), "tasks": fields, "disk": disk}


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _name(line: str) -> str:
    """Return the name in a line of the file; empty for a token without a name, and for comments."""
    fields = line.split()[:2]
    return fields[1][1:] if len(fields) == 2 and fields[1].startswith("@") and not fields[0].startswith("#") else ""


def _write(file: Path, lines: list[str]) -> None:
    """Replace the file at once, so that no process reads half of it. It keeps its owner and its rights."""
    target = Path(os.path.realpath(file))
    draft = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        draft.touch(mode=0o600, exist_ok=False)
        draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if target.exists():
            state = target.stat()
            if hasattr(os, "chown"):
                os.chown(draft, state.st_uid, state.st_gid)
            draft.chmod(state.st_mode & 0o777)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
