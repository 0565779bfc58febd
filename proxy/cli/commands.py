"""The commands that talk to a running proxy: their names, groups and examples in `forkpoint --help`."""

from collections.abc import Callable

import typer

from proxy.cli import data, data_directory, inspecting, launching, listing, operating, report, steering, tokens
from proxy.cli.options import with_proxy

RUN = "Run a proxy"
LIST = "List"
INSPECT = "Look at one thing"
STEER = "Steer"
OPERATE = "Operate"
"""The groups of commands, in the order of the help page."""

_COMMANDS: tuple[tuple[str, str, Callable[..., None], str], ...] = (
    (LIST, "tasks", listing.tasks, "forkpoint tasks --match 'django*'"),
    (LIST, "rollouts", listing.rollouts, "forkpoint rollouts demo --running"),
    (LIST, "snapshots", listing.snapshots, "forkpoint snapshots --task demo"),
    (LIST, "sandboxes", listing.sandboxes, "forkpoint sandboxes"),
    (LIST, "stats", listing.stats, "forkpoint stats --json | jq .hit_rate"),
    (LIST, "report", report.report, "forkpoint report --by step --label run=r7 --against run=r8 --html report.html"),
    (INSPECT, "tree", inspecting.tree, "forkpoint tree demo --node n3 --depth 5"),
    (INSPECT, "rollout", inspecting.rollout, "forkpoint rollout demo 1"),
    (INSPECT, "why", inspecting.why, "forkpoint why demo 1 3"),
    (INSPECT, "compare", inspecting.compare, "forkpoint compare demo --label step=3"),
    (INSPECT, "node", inspecting.node, "forkpoint node demo n2"),
    (INSPECT, "files", inspecting.files, "forkpoint files demo n2 /root/report.txt"),
    (INSPECT, "diff", inspecting.diff, "forkpoint diff demo n1 n2"),
    (INSPECT, "html", data.html, "forkpoint html demo rollout.html --rollout 1"),
    (INSPECT, "top", inspecting.top, "forkpoint top --every 5"),
    (STEER, "fork", steering.fork, "forkpoint fork demo 1 variant --node n2"),
    (STEER, "branch", steering.branch, "forkpoint branch demo 1 4 variant --upstream http://127.0.0.1:8000"),
    (STEER, "exec", steering.execute, "forkpoint exec demo n2 'ls -la'"),
    (STEER, "shell", steering.shell, "forkpoint shell demo n2"),
    (STEER, "pin", steering.pin, "forkpoint pin demo n2"),
    (STEER, "rm", steering.remove, "forkpoint rm demo --rollout 1"),
    (STEER, "open", steering.open_page, "forkpoint open demo --node n2"),
    (OPERATE, "verify", operating.verify, "forkpoint verify demo --sample 500"),
    (OPERATE, "export", operating.export_tree, "forkpoint export demo demo.tar --snapshots"),
    (OPERATE, "import", operating.import_tree, "forkpoint import demo.tar demo"),
    (OPERATE, "image", operating.image, "forkpoint image demo n2 demo:fixed"),
    (OPERATE, "trajectories", data.trajectories, "forkpoint trajectories run7.parquet --label run=r7"),
    (OPERATE, "gc", operating.gc, "forkpoint gc"),
    (OPERATE, "cluster", operating.cluster, "forkpoint cluster drain worker-3"),
    (OPERATE, "backup", data_directory.backup, "forkpoint backup monday.backup --snapshots"),
)
_OFFLINE: tuple[tuple[str, str, Callable[..., None], str], ...] = (
    (RUN, "launcher", launching.launcher, "forkpoint launcher --user forkpoint --data /var/lib/forkpoint"),
    (RUN, "up", launching.up, "forkpoint up --ray"),
    (RUN, "down", launching.down, "forkpoint down --ray"),
    (OPERATE, "token", tokens.token, "forkpoint token create alice --tasks 'alice-*' --file tokens"),
    (OPERATE, "restore", data_directory.restore, "forkpoint restore monday.backup --data restored"),
    (OPERATE, "upgrade", data_directory.upgrade, "forkpoint upgrade --check --data forkpoint-data"),
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for group, name, command, example in _COMMANDS:
        app.command(name, rich_help_panel=group, epilog=f"Example: {example}")(with_proxy(command))
    for group, name, command, example in _OFFLINE:
        app.command(name, rich_help_panel=group, epilog=f"Example: {example}")(command)
