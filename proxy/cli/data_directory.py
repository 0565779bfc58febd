"""Commands about the whole data directory: back it up, restore it, upgrade it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forkpoint.exchange import given
from proxy.cli.client import DEFAULT_DATA, ControlClient, fail
from proxy.cli.options import FileToWrite, JsonOption, SnapshotsOption
from proxy.cli.output import print_json
from proxy.cli.progress import bytes_bar, download

if TYPE_CHECKING:
    from proxy.storage.migrations import Migration

DirectoryOption = Annotated[
    Path, typer.Option("--data", envvar="FORKPOINT_DATA", help="Data directory that no proxy serves now.")
]


def backup(
    proxy: ControlClient, file: FileToWrite, *, snapshots: SnapshotsOption = False, json: JsonOption = False
) -> None:
    """Back up all tasks, trees and rollouts of a running proxy to one file."""
    with proxy.stream("GET", "backup", params=given(snapshots=snapshots or None)) as response:
        size = download(response, file, "backup")
    if json:
        print_json({"file": str(file), "bytes": size}, beside=file)
        return
    states = "Files' states are in it" if snapshots else "It holds no states: --snapshots adds those of files"
    typer.echo(f"{size / 1e6:,.1f} MB are in {file}. {states}. `forkpoint restore` reads it.", err=True)


def restore(
    file: Annotated[
        Path, typer.Argument(help="File that `backup` wrote.", metavar="FILE", exists=True, dir_okay=False)
    ],
    data: DirectoryOption = DEFAULT_DATA,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers of the proxy to come.", show_default="as in the backup")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Create a new data directory from a backup. Everything in the backup is checked first."""
    from proxy.logs import setup
    from proxy.storage.data_dir import require_undivided
    from proxy.storage.errors import StoreError
    from proxy.transfer.backup import restore as restore_backup

    setup("warning", json=False)
    try:
        require_undivided(data)
        with bytes_bar("restore", file.stat().st_size) as advance:
            restored = restore_backup(file, data, advance, workers=workers)
    except (StoreError, OSError) as error:
        fail(str(error))
    if json:
        print_json(restored)
        return
    typer.echo(f"{restored.tasks:,} tasks and {restored.calls:,} calls are in {data}.")
    if restored.snapshots:
        typer.echo(f"The first start of a proxy there adopts {restored.snapshots:,} snapshots.")
    if restored.lost_rollouts:
        typer.echo(
            f"{restored.lost_rollouts:,} rollouts ran when the backup was made: their agents may know later answers, "
            "so their calls are refused. Begin these rollouts again."
        )


def upgrade(
    data: DirectoryOption = DEFAULT_DATA,
    check: Annotated[bool, typer.Option("--check", help="Only show what an upgrade would change.")] = False,
    json: JsonOption = False,
) -> None:
    """Upgrade a data directory of an older version, as `serve` does at its start.

    With --check, exits with 1 if an upgrade is needed.
    """
    from proxy.logs import setup
    from proxy.storage.data_dir import STORE, owning, require_undivided
    from proxy.storage.database import schema_of
    from proxy.storage.errors import StoreError
    from proxy.storage.migrations import copy_path, pending
    from proxy.storage.schema import SCHEMA_VERSION
    from proxy.storage.store import Store

    setup("warning", json=False)
    path = data / STORE
    try:
        require_undivided(data)
        schema = schema_of(path)
        steps = pending(schema) if schema is not None else ()
        if steps and not check:
            with owning(data):
                Store(path).close()
    except (StoreError, OSError) as error:
        fail(str(error))
    copy = str(copy_path(path, schema)) if schema is not None and steps else None
    if json:
        changes = [{"schema": step.version, "change": step.summary} for step in steps]
        upgraded = bool(steps) and not check
        print_json({
            "schema": schema, "current": SCHEMA_VERSION, "changes": changes, "copy": copy, "upgraded": upgraded,
        })  # fmt: skip
    else:
        _describe(data, schema, steps, copy, check=check)
    if steps and check:
        raise typer.Exit(1)


def _describe(data: Path, schema: int | None, steps: "tuple[Migration, ...]", copy: str | None, *, check: bool) -> None:
    if schema is None:
        typer.echo(f"{data} has no store yet. Choose the directory with --data.")
    elif not steps:
        typer.echo(f"{data} has schema {schema}, which is this version's.")
    else:
        typer.echo(f"{data} {'has' if check else 'had'} schema {schema}. Changes:")
        for step in steps:
            typer.echo(f"  {step.version}: {step.summary}.")
        typer.echo(
            f"`forkpoint serve` and `forkpoint upgrade` make them, and keep the old store as {copy}."
            if check
            else f"The old store is kept as {copy}. Delete it when you do not want to go back."
        )
