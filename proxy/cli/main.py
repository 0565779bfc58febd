"""The command line of `forkpoint`: `serve`, `doctor` and `replay`; the other commands are in `commands`."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from importlib.metadata import version as distribution_version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from proxy.cli.client import fail
from proxy.cli.commands import RUN, add_commands
from proxy.cli.options import JsonOption
from proxy.cli.output import output_console, print_json
from proxy.cli.text import printable

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from proxy.cli.doctor import Requirement
    from proxy.settings import Settings

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What Typer raises for a command line that it cannot use. It is click's, or that of Typer's own copy of click."""


class _Commands(TyperGroup):
    """The commands; a command line that cannot be used ends with one sentence and status 2."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        # Without arguments, Typer raises a usage error that prints the help.
        with _usage_as_sentence() if args else nullcontext():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _usage_as_sentence():
            try:
                return super().invoke(ctx)
            except ImportError as error:
                if sys.platform == "linux" and sys.version_info >= (3, 11) and find_spec("fastapi"):
                    raise
                fail(
                    f"`forkpoint {ctx.invoked_subcommand}` needs the server, on Linux with Python 3.11 or newer: "
                    f"pip install 'forkpoint[server]'. ({error})"
                )


@contextmanager
def _usage_as_sentence() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = "forkpoint" if context is None else context.command_path
        text = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
        typer.echo(f"{printable(text)}{'' if text.endswith('?') else '.'} See `{command} --help`.", err=True)
        raise typer.Exit(2) from error


app = typer.Typer(
    name="forkpoint",
    cls=_Commands,
    help="A transparent proxy between LLM agents and their tools.",
    no_args_is_help=True,
    # A traceback with local variables would print what agents sent.
    pretty_exceptions_show_locals=False,
)

_OTHER_VARIABLES = (
    "FORKPOINT_URL", "FORKPOINT_NEEDS_", "FORKPOINT_THOROUGH", "FORKPOINT_OLDER_MOUNTS", "FORKPOINT_LAUNCHER",
)  # fmt: skip
"""Prefixes of variables that the commands and the tests read."""

DataOption = Annotated[
    Path | None,
    # `readable` would go by the user alone, and not by its capabilities.
    typer.Option(
        "--data", help="Directory of the store and the snapshots.", show_default="forkpoint-data", readable=False
    ),
]


def main() -> None:
    """Run the command line; the entry point of `forkpoint`."""
    app()


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"forkpoint {distribution_version('forkpoint')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=RUN, epilog="Example: forkpoint serve --port 9000 --data /var/lib/forkpoint")
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(help="TCP port to listen on.", show_default="8700", min=0, max=65535)
    ] = None,
    data: DataOption = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that share the port and the tasks.", show_default="1", min=1, max=256)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="PostgreSQL URL of the cluster to be a member of (docs/cluster.md).")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Directory or bucket that all members of the cluster share.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Name of this member of the cluster.", show_default="the host's name")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="HOST:PORT at which the other members reach this one.", show_default="automatic")
    ] = None,
    log: Annotated[
        str | None, typer.Option(help="Format of the log: 'pretty' or 'json'.", show_default="pretty")
    ] = None,
    descriptor: Annotated[
        int | None,
        typer.Option("--fd", help="File descriptor of a listening socket that the parent process made.", min=3),
    ] = None,
    parent: Annotated[
        int | None, typer.Option(help="Process id of the parent process; the proxy ends when it ends.", min=1)
    ] = None,
) -> None:
    """Run the proxy. Settings can also come from FORKPOINT_… variables or from the config file."""
    if parent is not None:
        _end_with(parent)
    settings = _settings(
        config,
        host=host,
        port=port,
        data=data,
        workers=workers,
        log=log,
        cluster=cluster,
        store=store,
        node=node,
        link=link,
    )
    from proxy.app import StartError, run
    from proxy.cli.doctor import check
    from proxy.cli.starting import plan
    from sandboxes.linux.syscalls import share_heap
    from sandboxes.pool.room import open_more_files

    # Before the checks, which start threads.
    share_heap()
    open_more_files()

    if settings.data.exists() and not settings.data.is_dir():
        fail(f"--data must name a directory, and {settings.data} is a file.")
    for unknown, meant in unknown_variables(os.environ):
        typer.echo(f"{unknown} is not a setting and is ignored.{meant and f' Did you mean {meant}?'}", err=True)
    start = plan(settings, check(settings.data, settings.driver_names, checkpoints=settings.checkpoints))
    if start.refusal:
        fail(start.refusal)
    try:
        run(start.settings, descriptor, start.left_out)
    except StartError as error:
        try:
            fail(f"The proxy cannot start: {error}")
        finally:
            if settings.cluster is not None:
                # A thread of the store's library that still returns from a request would abort Python's own exit.
                os._exit(1)


@app.command(rich_help_panel=RUN, epilog="Example: forkpoint doctor --json")
def doctor(
    data: DataOption = None,
    apparmor: Annotated[
        bool, typer.Option("--apparmor", help="Print an AppArmor profile that allows the launcher user namespaces.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check this machine against the requirements of the drivers, and say how to meet those that it does not."""
    from proxy.cli.doctor import check
    from proxy.cli.namespaces import profile, shared_interpreter

    if apparmor:
        interpreter = os.path.realpath(sys.executable)
        if warning := shared_interpreter(interpreter):
            typer.echo(warning, err=True)
        typer.echo(profile(interpreter), nl=False)
        return
    settings = _settings(None, data=data)
    requirements = check(settings.data, settings.driver_names, checkpoints=settings.checkpoints)
    if json:
        print_json(requirements)
    else:
        _show(requirements, output_console())
    if not all(requirement.ok for requirement in requirements if requirement.required):
        raise typer.Exit(1)


@app.command(rich_help_panel=RUN, epilog="Example: forkpoint replay rollouts.jsonl --rollouts 32 --noise")
def replay(
    files: Annotated[list[Path], typer.Argument(help="Workloads in JSONL, one rollout per line.", metavar="FILE…")],
    *,
    rollouts: Annotated[int, typer.Option(help="Number of concurrent rollouts.", min=1, max=4096)] = 8,
    url: Annotated[
        str | None, typer.Option(help="Base URL of a running proxy.", show_default="a temporary proxy")
    ] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Make only the uncached run.")] = False,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="Skip the uncached run and the comparison.")] = False,
    noise: Annotated[
        bool, typer.Option("--noise", help="Make a second uncached run, to measure how much two uncached runs differ.")
    ] = False,
    task: Annotated[str | None, typer.Option(help="Replay only tasks whose name matches this pattern (*, ?).")] = None,
    limit: Annotated[int | None, typer.Option(help="Replay only the first rollouts, up to this number.", min=1)] = None,
    keep_names: Annotated[
        bool, typer.Option("--keep-names", help="Keep the names of tasks, so that replays share their trees.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Replay recorded workloads through a proxy, and compare every answer with an uncached run.

    Exits with 1 if any call ended in an error.
    """
    from forkpoint.ephemeral_proxy import EphemeralProxyError
    from proxy.cli.replay import show as runs
    from proxy.cli.replay.report import as_json
    from proxy.cli.replay.runner import ReplayError
    from proxy.cli.replay.workload import WorkloadError, read_workload

    if no_compare and (baseline or noise):
        raise typer.BadParameter(
            "cannot be combined with --baseline or --noise, which are uncached runs.", param_hint="--no-compare"
        )
    try:
        workload = read_workload(files).select(task=task, limit=limit)
        if not workload.calls:
            fail("Nothing to replay: no rollout in these files matches. Check --task and --limit.")
        passes = [True] * (not baseline) + [False] * (0 if no_compare else 1 + noise)
        with runs.proxy_at(url) as proxy:
            report = asyncio.run(
                runs.make_runs(
                    workload, proxy, passes, at_once=rollouts, keep_names=keep_names, console=Console(stderr=True)
                )
            )
            # The results are shown before the temporary proxy stops, because stopping it may fail.
            if json:
                print_json(as_json(report.runs, report.comparisons))
            else:
                runs.show(report, output_console())
    except (WorkloadError, ReplayError, EphemeralProxyError, httpx.InvalidURL, OSError) as error:
        fail(str(error))
    if report.failed:
        raise typer.Exit(1)


def _end_with(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent ends, which then leaves no proxy behind."""
    from sandboxes.linux import syscalls as kernel

    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        fail(f"--parent {parent} is not the process that started this one, or it has ended.")


def _settings(config: Path | None, **options: object) -> "Settings":
    """Return the settings. Options come first, then the environment, the config file, and the defaults."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from proxy.settings import Settings

    if config is not None and not config.is_file():
        fail(f"--config names {config}, which is not a file. Write the settings there, or leave the option out.")
    try:
        return Settings.load(config, **options)
    except ValidationError as error:
        fail("\n".join(_fault(fault, config, options) for fault in error.errors()))
    except SettingsError as error:
        # The value of a variable with a list or an object, which pydantic-settings does not name.
        field = str(error).partition('field "')[2].partition('"')[0]
        fail(f'The setting {field} in FORKPOINT_{field.upper()} is invalid: write it as JSON, such as ["local"].')
    except (ValueError, OSError) as error:
        fail(f"The settings{'' if config is None else f' in {config}'} are invalid: {error}")


def _fault(fault: "ErrorDetails", config: Path | None, options: Mapping[str, object]) -> str:
    """Return one invalid setting in one line, with where its value comes from."""
    from proxy.settings import Settings

    name = str(fault["loc"][0]) if fault["loc"] else ""
    if not name:
        return f"The settings are invalid: {fault['msg'].removeprefix('Value error, ')}."
    variable = f"FORKPOINT_{name.upper()}"
    if options.get(name) is not None:
        source = f"--{name}"
    elif variable in os.environ:
        source = variable
    else:
        source = str(config)
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        meant = "".join(f" Did you mean {known}?" for known in get_close_matches(name, Settings.model_fields, n=1))
        return f"{source} has the key {name}, which is not a setting.{meant}"
    inner = "".join(f".{part}" for part in fault["loc"][1:])
    is_secret = "Secret" in str(Settings.model_fields[name].annotation)
    if is_secret and fault["type"] == "too_short":
        return f"The setting {name} in {source} is invalid: it needs {fault['ctx']['min_length']} characters or more."
    value = "" if is_secret or name == "token" else f", not {fault['input']!r}"
    return f"The setting {name}{inner} in {source} is invalid: {fault['msg'].removeprefix('Value error, ')}{value}."


def unknown_variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the FORKPOINT_ variables that are no settings, each with the setting that was probably meant, or ""."""
    from proxy.settings import Settings

    known = [f"FORKPOINT_{name.upper()}" for name in Settings.model_fields]
    return [
        (name, next(iter(get_close_matches(name, known, n=1)), ""))
        for name in sorted(environment)
        if name.startswith("FORKPOINT_") and not name.startswith(_OTHER_VARIABLES) and name not in known
    ]


def _show(requirements: Sequence["Requirement"], console: Console) -> None:
    """Print each requirement in one line, followed by its remedy if it is not met."""
    for requirement in requirements:
        if requirement.ok:
            mark, style = "ok", "green"
        else:
            mark, style = ("missing", "red") if requirement.required else ("optional", "yellow")
        line = Text(f"{mark:9}", style=style).append(f"{requirement.name}: ", style="bold").append(requirement.detail)
        console.print(line)
        if not requirement.ok:
            console.print(Text(f"{'':9}{requirement.remedy}"))


add_commands(app)

if __name__ == "__main__":
    main()
