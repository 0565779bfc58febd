"""The command line: `forkpoint serve`, `doctor`, `tree`, `top`, `replay` and the other commands.

Process: a process of its own for each command; `serve` becomes the proxy.
May import: proxy, proxy.cli.rendering, proxy.cli.replay, proxy.storage, proxy.transfer, snapshots.criu, sandboxes,
sandboxes.host, sandboxes.images, sandboxes.linux, sandboxes.local, sandboxes.pool, sandboxes.rights,
sandboxes.shell_files, sandboxes.sql, sandboxes.sqlite.
"""
