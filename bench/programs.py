"""Random programs of agents for `bench.differential`: groups of rollouts that share a beginning. Pure.

A program is the calls of one rollout, in order. Programs mix what agents do (git, make, Python, sed, archives) with
what is hard for a cache: background servers, pipes, signals, random content, large files, times of files, and
attributes of sessions.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.proxy import test_transparency_local as shell_calls
from tests.proxy import test_transparency_postgres as postgres_calls
from tests.proxy import test_transparency_sqlite as sqlite_calls
from tests.sandboxes.image_archives import agent_image

HOME = "/root"
COMMANDS = Path(__file__).with_name("commands.txt")
"""Shell commands, a section for each kind."""
DATES = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
"""Set-up runs once for the proxy and once for the private sandboxes; its commits must be equal."""
FILES = {
    "/root/counter.py": """
from itertools import count
for number in count(1):
    open("q").read()
    open("a", "w").write(f"{number}\\n")
""",
    "/root/mailbox.py": """
import os, time
os.open("box", os.O_RDWR)
open("ready", "w").close()
time.sleep(1000)
""",
    "/root/daemon.py": r"""
import fcntl, mmap, os, signal, socket, sys, time

def timer():
    count = 0
    def tick(*_):
        nonlocal count
        count += 1
        open("/tmp/ticks", "w").write(f"{count}")
    signal.signal(signal.SIGALRM, tick)
    signal.signal(signal.SIGUSR1, lambda *_: signal.setitimer(signal.ITIMER_REAL, 0.05))

def lease():
    fd = os.open("/tmp/leased", os.O_CREAT | os.O_RDWR)
    def give_up(*_):
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        open("/tmp/broken", "w").close()
    signal.signal(signal.SIGIO, give_up)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)

def words():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/tmp/words.sock")
    listener.listen()
    open("/tmp/daemon.words", "w").close()
    known = []
    while True:
        connection, _ = listener.accept()
        known.append(connection.recv(99).decode())
        connection.send(repr(known).encode())
        connection.close()

def shared():
    file = open("/dev/shm/box", "w+b")
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 0)
    open("/tmp/daemon.shared", "w").close()
    while True:
        time.sleep(0.02)
        if memory[0]:
            memory[1] += 1
            memory[0] = 0

def writer():
    import sqlite3
    base = sqlite3.connect("/tmp/live.db", isolation_level=None)
    base.execute("create table if not exists t(a)")
    base.execute("begin immediate")
    base.execute("insert into t values (5)")
    signal.signal(signal.SIGUSR2, lambda *_: (base.execute("commit"), open("/tmp/committed", "w").close()))
    return base

kept = globals()[sys.argv[1]]()
open(f"/tmp/daemon.{sys.argv[1]}", "w").close()
while True:
    signal.pause()
""",
    "/root/repo/data.csv": "name,count\npear,3\nfig,9\nplum,5\n",
    "/root/repo/app.py": """
def total(path):
    return sum(int(row.split(",")[1]) for row in open(path).read().split()[1:])
""",
    "/root/repo/Makefile": """
out: app.py data.csv
\tpython3 -c 'import app; print(app.total("data.csv"))' > out

.PHONY: clean
clean:
\trm -f out
""",
}
SETUP = (
    "echo seed > seed; mkdir -p /var/tmp",
    "cd repo; ! command -v git || { git init -q; git config user.email a@b; git config user.name a; }",
    "cd repo; ! command -v git || { git add -A; git commit -qm first; }",
    "find /root -exec touch -hd 2026-01-01 {} +",
    "cd repo; for F in data.csv app.py Makefile; do chmod u+r $F; sleep .02; done",
)
"""Set-up runs in both proxies, so its files get equal times at the end. Docker keeps only whole seconds of an image.

Times of change (`ls -c`) cannot be set. So they lie apart: the kernel's clock for files may stand for 10 ms.
"""
STATE = r"""
declare -p | grep -v -e RANDOM -e SECONDS -e EPOCH -e BASHPID -e PPID -e BASH_ARG -e ' [BPW]=' -e COPROC; declare -f
alias -p; trap -p; shopt; set -o; umask; ulimit -a; dirs; pwd -P; echo "$#:$*:$-"; enable -n
PATH=/usr/bin:/bin
shown() { find /root /tmp -name .git -prune -o -name __pycache__ -prune -o "$@"; }
shown -printf '%p %m %y %u:%g %l\n' | sort; shown ! -type d -printf '%p %n %s\n' | sort
shown -type f ! -name '*.tar' ! -name t.db ! -name 'live.db*' -print0 | sort -z | xargs -0 md5sum
ls -t /root/d /root/repo; pgrep -c sleep
"""
"""Shows what a state holds, without files whose bytes contain times or counters: of git, tar and SQLite."""
SMALLER = {"cd ..": "[ $PWD = /root ] || cd ..", "OLDPWD=/usr": "OLDPWD=/tmp"}
"""Commands in whose place others are run: at `/`, later ones would list, copy or change this whole machine's files."""
RANDOM = "head -c 8 /dev/urandom | od -An -tx1 > /var/tmp/id; cat /var/tmp/id"
"""Gives each rollout a value of its own. The same rollout must read the same value ever after."""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """One call of a program.

    Attributes:
        path: Path below the rollout's base URL.
        arguments: JSON body.
        recalls: Position of an earlier call of the program whose output this call must repeat, or None.
        random: Whether each run of the call has an output of its own, so that there is nothing to compare.
    """

    path: str
    arguments: dict[str, Any]
    recalls: int | None = None
    random: bool = False

    @property
    def text(self) -> str:
        """The command or statement, for reports."""
        return str(self.arguments.get("command", self.arguments.get("sql")))


Program = tuple[ProgramCall, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task.

    Attributes:
        spec: The task's spec.
        programs: A program for each rollout; equal programs may occur.
    """

    spec: dict[str, Any]
    programs: tuple[Program, ...]


def shell_spec(driver: str) -> dict[str, Any]:
    """Return the spec of shell programs; the driver `image` stands for `local` on an image."""
    spec = {"workdir": HOME, "files": FILES, "setup": list(SETUP), "env": DATES}
    return spec | {"image": agent_image()} if driver == "image" else spec


def commands(file: Path = COMMANDS) -> dict[str, list[str]]:
    """Return the commands of a file by section; a line that begins with a tab continues the command before it."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("== "):
            sections[line[3:]] = current = []
        elif line.startswith("\t"):
            current[-1] += f"\n{line[1:]}"
        else:
            current.append(line)
    return sections


def shell_group(dice: random.Random, spec: dict[str, Any], rollouts: int, length: int) -> Group:
    """Return a group of shell programs; each ends with commands that show the whole state."""
    known = commands()
    weighted: list[tuple[Sequence[str], int]] = [
        (shell_calls.FILES, 4), (shell_calls.LOOKS, 4), (shell_calls.SESSIONS, 3), (shell_calls.ENDS, 1),
        (shell_calls.PROCESSES, 1),
        (known["agent"], 6), (known["live"], 3), (known["attributes"], 2), (known["shell"], 3), (known["files"], 3),
        (known["daemons"], 2), (known["habits"], 5), (known["links"], 3), (known["chance"], 2),
        (known["large"], 1 if dice.random() < 0.05 else 0),
    ]  # fmt: skip
    pools, weights = zip(*weighted, strict=True)

    def draw() -> str:
        pool: Sequence[str] = dice.choices(pools, weights)[0]
        command = dice.choice(pool)
        return SMALLER.get(command, command)

    at = dice.randrange(length) if dice.random() < 0.4 else None
    trunk, suffixes = _shape(dice, draw, rollouts, length)
    if at is not None and at < len(trunk):
        trunk[at] = RANDOM
    programs = []
    for cut, suffix in suffixes:
        program = [shell_call(command) for command in trunk[:cut] + suffix]
        if at is not None and at < cut:
            # Comments make these reads different calls, so each is looked up or executed on its own. The path is
            # absolute because a program may have lost its `PATH`.
            for number, position in enumerate(sorted(dice.choices(range(at + 1, len(program) + 1), k=2))):
                program.insert(position + number, shell_call(f"/bin/cat /var/tmp/id # {dice.randrange(3)}", recalls=at))
        programs.append((*program, shell_call(STATE)))
    return Group(spec, tuple(programs))


def sql_group(dice: random.Random, spec: dict[str, Any], rollouts: int, length: int) -> Group:
    """Return a group of SQL programs for the driver that the spec names."""
    if spec["driver"] == "sqlite":
        statements: Sequence[str] = sqlite_calls.SQL + sqlite_calls.MORE_SQL
        end: Sequence[str] = (
            "ROLLBACK",
            "SELECT * FROM item",
            "SELECT * FROM sale",
            "SELECT name, sql FROM sqlite_schema",
        )
    else:
        calls = postgres_calls
        statements, end = (
            (*calls.READS, *calls.READS, *calls.WRITES, *calls.WRITES, *calls.SCHEMA, *calls.SESSIONS, *calls.RARE),
            calls.END,
        )
    trunk, suffixes = _shape(dice, lambda: dice.choice(statements), rollouts, length)
    return Group(
        spec, tuple(tuple(sql_call(text) for text in (*trunk[:cut], *suffix, *end)) for cut, suffix in suffixes)
    )


def _shape(
    dice: random.Random, draw: Callable[[], str], rollouts: int, length: int
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return a trunk, and for each rollout where it leaves the trunk and with which calls."""
    trunk = [draw() for _ in range(length)]
    suffixes: list[tuple[int, list[str]]] = [(length, [])]
    for _ in range(rollouts - 1):
        shared, suffix = dice.choice(suffixes)
        # Half of the rollouts leave another one's suffix, so that trees become deep.
        kept = dice.randrange(len(suffix) + 1)
        cut = shared if suffix and dice.random() < 0.5 else max(dice.randint(0, length), dice.randint(0, length))
        kept = kept if cut == shared else 0
        suffixes.append((cut, suffix[:kept] + [draw() for _ in range(dice.randrange(length // 2 + 1))]))
    return trunk, suffixes


def shell_call(command: str, recalls: int | None = None) -> ProgramCall:
    return ProgramCall("shell/exec", {"command": command, "timeout_s": 30}, recalls, command == RANDOM)


def sql_call(statement: str) -> ProgramCall:
    return ProgramCall("sql/query", {"sql": statement, "timeout_s": 30})
