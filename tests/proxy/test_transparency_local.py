"""Promise 1 with real shells: the whole engine on the local driver, against fresh sandboxes of the driver alone.

FORKPOINT_THOROUGH=20 runs twenty times as many examples.
"""

import asyncio
import contextlib
import difflib
import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.engine import Engine, build_engine
from proxy.settings import Settings
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.driver import Driver
from sandboxes.errors import SandboxError
from sandboxes.linux.files import remove_tree
from sandboxes.local.driver import LocalDriver
from sandboxes.pool.pool import OverloadedError
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import local_driver

EXAMPLES = 15 * int(os.environ.get("FORKPOINT_THOROUGH", "1"))
SPEC = EnvironmentSpec(files={"/root/seed": "seed\n"})

FILES = (
    "echo one > a", "echo two >> a", "printf 'x\\ny\\n' > b", "rm a", "rm -rf d", "mkdir -p d/e", "mkdir d",
    "mv a b", "mv d e", "mv b d/", "cp -a a b", "cp a d/", "ln -s a l", "ln -sfn d l", "ln -f a h",
    "echo more >> h", "chmod 600 a", "chmod 700 d", "chmod u+x a; ./a", "cat > a <<E\nline $X\nE",
    "cat >> b <<'E'\n$X\nE", "sed -i s/o/0/ a", "touch -d 2001-02-03 a", "touch -d 2002-02-03 b", "touch -r b a",
    "sleep .02; echo t > d/one", "sleep .02; echo t > d/two", "truncate -s 9 a", ": > d/z; rm d/z", "mkfifo p",
    "cp seed a; rm seed", "echo $X > seed", "rm -rf d; mkdir d; echo new > d/only", "mv seed d/seed",
    "chown 7:8 a", "python3 -c 'import os; os.setxattr(\"a\", \"user.k\", b\"w\")'", "rmdir d",
)  # fmt: skip
LOOKS = (
    "cat a", "cat b", "cat h", "cat l", "cat seed", "cat d/one", "ls", "ls d", "ls -t", "ls -t d", "ls -R",
    "stat -c '%n %a %s %h %F %u:%g' a b h l seed", "stat -c '%n %a %F' d", "readlink l", "test a -nt b; echo $?",
    "find . | sort",
    "python3 -c 'import os; print(os.getxattr(\"a\", \"user.k\"))' 2>&1 | tail -1", "[ a -ef h ]; echo $?",
    "stat -c '%n %Y' a b | grep 2001",
)  # fmt: skip
SESSIONS = (
    "X=1", "X=2; Y=$X$X", "export X", "export X=3", "unset X", "echo \"$X,$Y\"", "env | grep ^X=",
    "bash -c 'echo $X'", "declare -p X Y", "arr=(1 'two words' 3)", "arr+=(4)", "unset 'arr[1]'",
    "echo \"${#arr[@]}:${arr[@]}\"", "declare -A m=([k]=v)", "m[j]=w", "echo \"${m[k]}${m[j]}\"",
    "f() { echo \"f:$X:$1\"; }", "f() { X=set-by-f; }", "f 1", "unset -f f", "declare -f f",
    "export -f f; bash -c f", "alias ll='echo alias'", "ll", "unalias ll", "cd d", "cd ..", "cd /tmp", "cd -", "cd",
    "pwd", "pushd d", "popd", "dirs", "set -o noclobber", "set +o noclobber", "set -u", "set +u", "set -f",
    "set +f", "set -o pipefail", "echo *", "false | true; echo $?", "echo $UNSET; echo on", "echo $-",
    "trap 'echo bye' EXIT", "trap 'echo err' ERR", "trap - EXIT ERR", "trap -p", "umask 077", "umask 022", "umask",
    "declare -r R=1", "R=2; echo no", "declare -i N=3", "N+=4; echo $N", "IFS=:", "IFS=$' \\t\\n'",
    "v=a:b; echo $v", "set -- p 'q r'", "echo \"$#:$2\"", "shift", "shopt -s nullglob", "echo nothing*",
    "shopt -u nullglob", "ulimit -n 99", "ulimit -n", "OLDPWD=/usr", "PS4=++", "SECONDS=; x=",
    "printf -v Z '%q' 'a b'; echo $Z", "read -r L < a; echo $L", "mapfile -t arr < b", "exec 2>&1",
    "let n+=1; echo $n", "hash -r", "enable -n echo", "enable echo", "PATH=/none; ls",
)  # fmt: skip
ENDS = (
    "true", "false", "exit 3", "X=5; exit 4", "set -e; false; echo no", "return 3", "kill -9 $$", "nonsense",
    "if true", "echo 'open", "(cd /; X=9; exit 6)", "echo $?", "exec true", "X=6; exec false", "break", "local z",
    "logout",
)  # fmt: skip
PROCESSES = (
    "sleep 1000 &", "pgrep -c sleep", "{ kill %1 && wait %1; } 2>/dev/null", "pkill sleep; sleep .05",
    "jobs | wc -l", "(sleep 1000 > /dev/null 2>&1 &) ; echo left", "nohup sleep 1000 > nohup.txt 2>&1 &",
    "sleep .01 & wait $!; echo $?", "disown -a; echo $?", "[[ $X =~ . ]]; true", "echo ${BASH_REMATCH[0]}",
    "kill -0 $! 2>/dev/null; echo $?", "sleep 1000 | cat &", "kill %2 2>/dev/null; echo $?",
)  # fmt: skip
EVERYTHING = r"""
declare -p | grep -v -e RANDOM -e SECONDS -e EPOCH -e BASHPID -e PPID -e BASH_ARG; declare -f; alias -p; trap -p; shopt
set -o; umask; ulimit -a; dirs; echo "$#:$*:$-"; enable -n
PATH=/usr/bin:/bin
cd /root && find . -printf '%p %m %y %u:%g %l\n' | sort; find . ! -type d -printf '%p %n %s\n' | sort
for f in $(find . /tmp -type f | sort); do echo "$f"; cat "$f"; done; ls -t d; pgrep -c sleep
"""
"""Shows what a state holds (docs/state.md: what it does not); ends each trajectory, so that nothing is lost unseen."""


def shell(command: str, session: str = "main") -> ToolCall:
    return ToolCall("shell", "exec", {"command": command, "session": session, "timeout_s": 20.0})


def put(path: str, body: bytes, mode: int | None) -> ToolCall:
    arguments = {"path": path, "sha256": sha256(body).hexdigest()} | ({} if mode is None else {"mode": mode})
    return ToolCall("shell", "put", arguments, body)


paths = st.sampled_from(["/root/a", "/root/b", "/root/d/f", "/root/l", "/tmp/t", "/root/d"])
calls = st.one_of(
    st.builds(shell, st.sampled_from(FILES)),
    st.builds(shell, st.sampled_from(LOOKS)),
    st.builds(shell, st.sampled_from(SESSIONS)),
    st.builds(shell, st.sampled_from(SESSIONS + LOOKS + FILES), st.just("other")),
    st.builds(shell, st.sampled_from(ENDS)),
    st.builds(shell, st.sampled_from(PROCESSES)),
    st.builds(
        put, paths, st.sampled_from([b"", b"#!/bin/sh\necho run\n", b"\0\xff"]), st.sampled_from([None, 0o755, 0o600])
    ),
    st.builds(lambda path, tool: ToolCall("shell", tool, {"path": path}), paths, st.sampled_from(["get", "delete"])),
)


@st.composite
def groups(draw: st.DrawFn) -> list[list[ToolCall]]:
    """Draw the trajectories of a group: they share a beginning, and leave it at places of their own."""
    trunk = draw(st.lists(calls, min_size=1, max_size=10))
    leaves = st.tuples(st.integers(0, len(trunk)), st.lists(calls, max_size=6))
    look = [shell(EVERYTHING), shell(EVERYTHING, "other")]
    return [trunk[:cut] + suffix + look for cut, suffix in draw(st.lists(leaves, min_size=1, max_size=3))]


Answer = tuple[int, bytes]


class Trouble:
    """Kills sandboxes and drops snapshots between calls, as its dice say."""

    def __init__(self, running: Engine, driver: LocalDriver, seed: int, kill: float, drop: float) -> None:
        self.running, self.driver, self.kill, self.drop = running, driver, kill, drop
        self.dice = random.Random(seed)  # noqa: S311 - dice of a test

    async def strike(self, call: ToolCall) -> None:
        """Do harm, or not, before a call. One that shows everything is made in a sandbox that was just brought back."""
        if self.kill and call == shell(EVERYTHING):
            await self.running.capture.drain()
            await self.running.pool.close_where(lambda _: True)
        if self.dice.random() < 0.3:
            await self.running.capture.drain()
        if self.dice.random() < self.kill and (running := list(self.driver.sandboxes)):
            # One, or all: the next call then needs a restore or a replay.
            for victim in running if self.dice.random() < 0.5 else self.dice.sample(running, 1):
                victim._kill()
        for snapshot in self.running.snapshots:
            node = self.running.trees.node(snapshot.tree, snapshot.node)
            if node is not None and not snapshot.leases and self.dice.random() < self.drop:
                self.running.cache.drop(node)


async def alone(driver: Driver, trajectory: list[ToolCall]) -> list[Answer]:
    sandbox = await driver.start(SPEC)
    try:
        results = [(await sandbox.execute(call)).result for call in trajectory]
    finally:
        await sandbox.close()
    return [(result.status, result.body) for result in results]


async def walk(running: Engine, task: str, name: str, trajectory: list[ToolCall], trouble: Trouble) -> list[Answer]:
    answers = []
    for call in trajectory:
        await trouble.strike(call)
        rollout = await running.tasks.rollout(task, name)
        for _ in range(50):
            with contextlib.suppress(SandboxError, OverloadedError):
                key = call_key(call)
                record = running.step.known(rollout, key) or (await running.step.run(rollout, call, key)).record
                break
        else:
            pytest.fail(f"{call} never got an answer")
        result = running.store.records.result(record)
        answers.append((result.status, result.body))
    return answers


def differences(group: list[list[ToolCall]], got: list[list[Answer]], truth: list[list[Answer]]) -> list[str]:
    """Say in few lines which answers differ, and how."""
    results = []
    for name, (trajectory, each, true) in enumerate(zip(group, got, truth, strict=True)):
        for turn, call in enumerate(trajectory):
            if each[turn] != true[turn]:
                one, two = (answer[1].decode(errors="replace").split("\\n") for answer in (true[turn], each[turn]))
                changed = "\n".join(difflib.unified_diff(one, two, "alone", "together", n=0, lineterm=""))
                before = [result.arguments.get("command", result.tool) for result in trajectory[:turn]]
                results.append(f"rollout {name}, turn {turn}, {call.arguments}, after {before}:\n{changed}")
    return results


class Bench:
    """An engine on the local driver, and beside it the driver alone. One for all examples: a start costs a second."""

    def __init__(self, runner: asyncio.Runner, data: Path) -> None:
        self.runner = runner
        self.driver, self.bare = local_driver(data / "local"), LocalDriver(data / "bare")
        self._settings = Settings(data=data, default_spec=SPEC, max_sandboxes=12)
        self._tasks = itertools.count()

    async def open(self) -> None:
        self.engine = build_engine(self._settings, {"local": self.driver})
        await self.engine.open()
        await self.bare.open()

    async def aclose(self) -> None:
        await self.engine.aclose()
        await self.bare.aclose()

    async def together(self, group: list[list[ToolCall]], trouble: Trouble) -> list[list[Answer]]:
        task = f"task{next(self._tasks)}"
        walks = [walk(self.engine, task, f"r{n}", trajectory, trouble) for n, trajectory in enumerate(group)]
        answers = await asyncio.gather(*walks)
        await self.engine.capture.drain()
        self.engine.pool.roster.check()
        (await self.engine.tasks.open(task)).tree.check()
        # What one example leaves must not slow the next one down.
        await self.engine.forgetting.delete_task(task)
        await self.engine.pool.close_where(lambda _: True)
        await self.engine.evict_snapshots()
        return list(answers)

    async def apart(self, group: list[list[ToolCall]]) -> list[list[Answer]]:
        return [await alone(self.bare, trajectory) for trajectory in group]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    require_sandboxes()
    data = Path(tempfile.mkdtemp(prefix="forkpoint-test-", dir="/var/tmp"))
    with asyncio.Runner() as runner:
        made = Bench(runner, data)
        runner.run(made.open())
        yield made
        runner.run(made.aclose())
    remove_tree(data)


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(groups(), st.integers(0, 1 << 32), st.sampled_from([0, 0.3]), st.sampled_from([0, 0.3]))
def test_each_rollout_is_answered_as_if_alone(
    bench: Bench, group: list[list[ToolCall]], seed: int, kill: float, drop: float
) -> None:
    trouble = Trouble(bench.engine, bench.driver, seed, kill, drop)
    got = bench.runner.run(bench.together(group, trouble))
    result = differences(group, got, bench.runner.run(bench.apart(group)))
    assert not result, "\n".join(result)
