"""Defaults of machine sandboxes: environment variables and the disk reserve."""

RESERVE_BYTES = 64 << 20
"""With less free disk than this, a failed call may be the machine's fault, so it is an error and no result."""
LITTLE_ROOM = f"less than {RESERVE_BYTES >> 20} MB of disk are free"
"""What errors say then."""

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "SHLVL": "0",
    # Without these two, `python x.py` and `git status` would count as changes of files.
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}
