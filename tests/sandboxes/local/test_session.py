"""What a session keeps, and what a call may do to its shell."""

import asyncio
import re
import signal
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from sandboxes.calls import ToolCall
from sandboxes.driver import Driver, Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError
from sandboxes.process_output import ending
from sandboxes.spec import EnvironmentSpec, Limits
from tests.sandboxes.box import in_sandbox, local_driver, needs_forks, opened, ran, reads, run
from tests.sandboxes.conftest import execute_shells
from tests.sandboxes.processes import leave
from tests.sandboxes.session_contract import SessionContract

KEPT = [
    ("a=(1 'two words' $'new\\nline')", "declare -p a", 'declare -a a=([0]="1" [1]="two words" [2]=$\'new\\nline\')\n'),
    ("declare -A m=([k]=v ['a b']='$(x)`y`')", 'echo "${m[k]}|${m[a b]}"', "v|$(x)`y`\n"),
    ("declare -r fixed=1; declare -i n=3", "n+=4; echo $fixed $n; fixed=2", "1 7\n"),
    ("export E=exported", "env | grep ^E=", "E=exported\n"),
    ("unset HOME LANG", 'echo "[${HOME-none}${LANG-none}]"', "[nonenone]\n"),
    ('f() { echo "f $1"; cat <<X\nhere $1\nX\n}', "f 2", "f 2\nhere 2\n"),
    ("g() { echo exported-g; }; export -f g", "bash -c g", "exported-g\n"),
    ("alias ll='echo alias'", "ll x", "alias x\n"),
    ("shopt -s nullglob extglob", "echo /nothing*; [[ ab == +(a|b) ]] && echo ext", "\next\n"),
    ("set -o pipefail; set -f", "false | true; echo $?; echo /*", "1\n/*\n"),
    ("set -u", "echo $nothing", ""),
    ("umask 077", "touch /tmp/u; stat -c %a /tmp/u", "600\n"),
    ("set -- one 'two three'", 'echo "$#:$2"', "2:two three\n"),
    ("cd /usr; pushd /tmp >/dev/null", "dirs; popd", "/tmp /usr\n/usr\n"),
    ("cd /usr; cd /tmp", "cd -", "/usr\n"),
    ("ulimit -n 100", "ulimit -n", "100\n"),
    ("trap 'echo bye' EXIT", "exit 3", "bye\n"),
    ("trap 'echo usr' USR1", "kill -USR1 $$; true", "usr\n"),
    ("IFS=:", 'v=a:b; printf "<%s>" $v', "<a><b>"),
    ("x=\"$(printf 'q\\x27 \\x22 \\\\ $y `z` \\xff end')\"", "printf %s \"$x\" | od -An -tx1 | tr -d ' \\n'", None),
    ("REPLY=mine", "echo $REPLY", "mine\n"),
    ("PATH=/usr/bin", "echo $PATH", "/usr/bin\n"),
]


class TestLocalSessions(SessionContract):
    examples = 10

    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return local_driver(data_dir)


@pytest.mark.parametrize(("before", "after", "out"), KEPT, ids=[before.split("\n")[0] for before, _, _ in KEPT])
def test_a_session_keeps(data_dir: Path, before: str, after: str, out: str | None) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            spec = EnvironmentSpec()
            sandbox = await driver.start(spec)
            assert Effect.SESSION in (await run(sandbox, before)).effect
            assert (await run(sandbox, "true")).effect is Effect.NONE
            frozen = await sandbox.freeze()
            restored = await driver.restore(spec, frozen)
            assert (await run(restored, "true")).state == frozen.state
            live, back = await run(sandbox, after), await run(restored, after)
            assert live.outcome == back.outcome
            assert out is None or live.out == out

    asyncio.run(go())


def test_commands_run_at_the_shells_top_level(data_dir: Path) -> None:
    """Commands run at the top level of the shell, not in a function or a subshell."""

    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "if true")).code == 2
        assert (await run(sandbox, "return 3; echo on")).out == "on\n"
        assert (await run(sandbox, "break; echo still")).out == "still\n"
        assert (await run(sandbox, "declare v=1; local w")).code == 1
        assert (await run(sandbox, "echo $v; cat <<E\nhere\nE\necho $((1+1))\n")).out == "1\nhere\n2\n"
        assert (await run(sandbox, "cat; read x; echo $?")).out == "1\n"
        assert (await run(sandbox, "echo $? $_")).out == "0\n"
        assert (await run(sandbox, "echo e >&2; echo $0")).outcome == ("bash\n", "e\n", 0, Effect.NONE)
        assert (await run(sandbox, "nope")).err == "bash: line 1: nope: command not found\n"
        assert (await run(sandbox, "ls /proc/self/fd")).out == "0\n1\n2\n3\n"

    in_sandbox(data_dir, test)


def test_invalid_command_keeps_options_and_traps(data_dir: Path) -> None:
    """A command with a syntax error leaves options and traps as they were."""

    async def test(sandbox: Sandbox) -> None:
        traps = ["trap -- 'echo one' SIGUSR1", "trap -- 'echo two' SIGUSR2", "trap -- 'many\nlines' SIGALRM"]
        await run(sandbox, f"set -u -o pipefail; IFS=dt; {'; '.join(traps)}")
        for broken in ("if true", "fi", "echo 'open", "$(", "((", "f() {"):
            result = await run(sandbox, broken)
            assert result.code != 0, broken
            assert result.effect is Effect.NONE, broken
        assert (await run(sandbox, "trap -p; echo $-")).out == "\n".join([*sorted(traps, key=_number), "huBc\n"])
        assert (await run(sandbox, "nope\nnope")).err == (
            "bash: line 1: nope: command not found\nbash: line 2: nope: command not found\n"
        )
        assert (await run(sandbox, "if true")).err == "bash: eval: line 2: syntax error: unexpected end of file\n"
        assert (await run(sandbox, "echo $unset; echo on")).err == "bash: line 1: unset: unbound variable\n"

    in_sandbox(data_dir, test)


def _number(trap: str) -> int:
    return signal.Signals[trap.rpartition(" ")[2]].value


def test_what_is_traced_is_the_command(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "set -x; echo a")).outcome == ("a\n", "+++ echo a\n", 0, Effect.SESSION)
        assert (await run(sandbox, "echo b")).outcome == ("b\n", "+++ echo b\n", 0, Effect.NONE)
        assert (await run(sandbox, "set +x; set -v")).err == "+++ set +x\n"
        assert (await run(sandbox, "echo c")).outcome == ("c\n", "echo c\n", 0, Effect.NONE)

    in_sandbox(data_dir, test)


def test_errors_of_a_traced_session_are_bash_s_own(data_dir: Path) -> None:
    """A syntax error shows none of our lines, and what traces the session stays. Lines are counted from 1."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "set -x; trap 'echo d' DEBUG; trap 'echo e >&2' ERR")
        error = "bash: eval: line 2: syntax error near unexpected token `fi'\nbash: eval: line 2: `fi'\n"
        assert (await run(sandbox, "\nfi")).outcome == ("", error, 2, Effect.NONE)
        assert (await run(sandbox, "trap - DEBUG; set +x\n(exit 3)")).err == (
            "++++ echo d\n+++ trap - DEBUG\n+++ set +x\ne\n"
        )
        assert (await run(sandbox, "\nnope")).err == "bash: line 2: nope: command not found\ne\n"

    in_sandbox(data_dir, test)


def test_signal_dispositions_are_the_defaults(data_dir: Path) -> None:
    ignored = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})

    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "trap -p")).out == ""
        for answer in (
            (await run(sandbox, "grep -E 'Sig(Ign|Blk)' /proc/self/status")).out,
            (await ran(sandbox, "grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")).out.decode(),
        ):
            assert [int(line.split()[1], 16) for line in answer.splitlines()] == [0, 0]
        interrupted = await run(sandbox, "python3 -c 'import os; os.kill(os.getpid(), 2)'")
        assert interrupted.code == 130
        assert "KeyboardInterrupt" in interrupted.err

    try:
        in_sandbox(data_dir, test)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_next_shell_has_other_pipes_than_what_was_left(data_dir: Path) -> None:
    """What a shell left running prints into a pipe that nobody reads, and not into the next shell's answer."""
    late = "trap '' PIPE; until [ -e go ]; do sleep 0.01; done; echo late; touch printed"

    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, f"({late}) & exit 3")).code == 3
        answer = await run(sandbox, "touch go; until [ -e printed ]; do sleep 0.01; done; echo now")
        assert answer.out == "now\n"

    in_sandbox(data_dir, test)


def test_changed_pipes_are_not_the_next_shells(data_dir: Path) -> None:
    """Reading calls in a row have the same anchor, and still no trace of one is in the next."""

    async def test(sandbox: Sandbox) -> None:
        shows = "stat -Lc %a:%u /dev/stdout /dev/stderr"
        before = await run(sandbox, shows)
        for change in ("chmod 600 /dev/stdout", "chown 7 /dev/stderr"):
            await run(sandbox, change)
            assert (await run(sandbox, shows)).printed == before.printed

    in_sandbox(data_dir, test)


@pytest.mark.usefixtures("shells")
def test_touched_anchor_does_not_stay_over_changes(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        before = await run(sandbox, "ulimit -n")
        for touch in ("prlimit --pid $PPID --nofile=50", "kill -STOP $PPID"):
            await run(sandbox, f"{touch}; date +%N >> /tmp/changed")
            assert (await run(sandbox, "ulimit -n")).printed == before.printed

    in_sandbox(data_dir, test)


@needs_forks
def test_anchor_stays_over_changes_and_nothing_enters_it(data_dir: Path) -> None:
    """A process that could enter it would hold files of layers that are sealed by now."""
    trace = "import ctypes, os; print(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))"

    async def test(sandbox: Sandbox) -> None:
        before = (await run(sandbox, "echo $PPID; touch /tmp/changed")).out
        assert (await run(sandbox, f'echo $PPID; exec python3 -c "{trace}"')).out == f"{before}-1\n"
        for name in ("fd/1", "cwd", "root", "exe"):
            assert (await run(sandbox, f"readlink /proc/$PPID/{name}")).code == 1
        for name in ("mem", "fd/3", "maps", "environ"):
            assert "denied" in (await run(sandbox, f": <>/proc/$PPID/{name} || head -c1 /proc/$PPID/{name}")).err

    in_sandbox(data_dir, test)


def test_what_ends_the_shell_ends_the_call_only(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "x=kept")
        for command, code in (
            ("x=2; exit 5", 5),
            ("x=3; set -e; false; echo no", 1),
            ("x=4; kill -9 $$", 137),
            ("x=5; exec true", 0),
            ("x=6; exec /nonexistent", 127),
        ):
            answer = await run(sandbox, command)
            assert (answer.code, answer.out) == (code, "")
            assert (await run(sandbox, "echo $x")).out == "kept\n"

    in_sandbox(data_dir, test)


def test_overdue_call_is_killed_with_its_children(data_dir: Path) -> None:
    """A call that exceeds its time limit is killed together with all processes that it started."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "x=1")
        for command in (
            "echo begun; sleep 60",
            "echo begun; while :; do :; done",
            "echo begun; (setsid sleep 60 &) ; sleep 60",
        ):
            answer = await run(sandbox, command, timeout_s=3.0)
            assert (answer.timed_out, answer.code, answer.out) == (True, 124, "begun\n")
            assert "Killed" not in answer.err
        assert (await run(sandbox, "echo $x; ps -e -o comm= | grep -c sleep")).out == "1\n0\n"
        await sandbox.freeze()

    in_sandbox(data_dir, test)


def test_a_timeout_is_not_for_other_rollouts(data_dir: Path) -> None:
    """How far a call comes in its time depends on the machine, so only a task that says so shares its result."""
    slow = ToolCall("shell", "exec", {"command": "echo part > f; sleep 60", "timeout_s": 3.0, "session": "main"})
    limited = ToolCall("shell", "exec", {"command": "ulimit -t 1; false", "timeout_s": 9.0, "session": "main"})

    async def body() -> None:
        async with opened(local_driver(data_dir)) as driver:
            for spec in (EnvironmentSpec(), EnvironmentSpec(timeouts="shared")):
                sandbox = await driver.start(spec)
                assert (await sandbox.execute(slow)).shareable is spec.shares_timeouts
                assert (await run(sandbox, "cat f")).out == "part\n", "its effects are real"
                assert (await sandbox.execute(limited)).shareable

    asyncio.run(body())


def test_background_processes_live_until_they_end(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, "mkfifo /tmp/p; (cat /tmp/p; echo done > /tmp/done) & x=1 P=$!")
        assert answer.effect == Effect.PROCESSES | Effect.FILES | Effect.SESSION
        with pytest.raises(NotFreezableError, match="process"):
            await sandbox.freeze()
        assert (await run(sandbox, "jobs | wc -l; kill -0 $! && echo there")).out == "1\nthere\n"
        killed = await run(sandbox, "sleep 60", timeout_s=0.2)
        assert killed.timed_out
        assert (await run(sandbox, "ps -e -o comm= | grep -c cat")).out == "1\n"
        ended = await run(sandbox, "echo go > /tmp/p; while kill -0 $P 2>/dev/null; do sleep 0.01; done; cat /tmp/done")
        assert ended.out == "done\n"
        assert Effect.PROCESSES in ended.effect
        assert ended.state is not None
        await sandbox.freeze()
        assert (await run(sandbox, "echo $x")).out == "1\n"

    in_sandbox(data_dir, test)


@pytest.mark.parametrize("call", ["disown -a", "exit 3", "sleep 0.01 & wait $!", "kill %2; wait %2"])
def test_changed_job_list_is_a_change(data_dir: Path, call: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "sleep 60 & sleep 30 &")
        assert Effect.PROCESSES in (await run(sandbox, call)).effect
        assert (await run(sandbox, "jobs; true")).effect is Effect.NONE

    in_sandbox(data_dir, test)


COUNTER = """
import os
count = 0
while True:
    with open('/tmp/in') as pipe:
        pipe.read()
    count += 1
    with open('/tmp/out', 'w') as pipe:
        print(count, file=pipe)
"""


def test_server_that_ran_counts_as_a_change(
    data_dir: Path,
) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, f"mkfifo /tmp/in /tmp/out; cat > /tmp/s.py <<'E'\n{COUNTER}\nE\npython3 /tmp/s.py &")
        for count in (1, 2):
            asked = await run(sandbox, "echo > /tmp/in; cat /tmp/out")
            assert asked.out == f"{count}\n"
            assert asked.effect is Effect.PROCESSES
            assert await reads(sandbox, "ls /tmp; kill -0 %1")

    in_sandbox(data_dir, test)


@pytest.mark.parametrize("call", ["cd /tmp", "export -n PWD", "export OLDPWD=/", "export -n SHLVL", "declare -r Z=1"])
def test_restored_session_shows_the_same_variables(data_dir: Path, call: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        look = "declare -p PWD OLDPWD SHLVL Z 2>/dev/null; true"
        output = (await run(sandbox, f"{call}; {look}")).out
        assert (await run(sandbox, look)).out == output

    in_sandbox(data_dir, test)


@pytest.mark.usefixtures("shells")
def test_a_sandbox_whose_anchor_was_killed_goes_on(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "x=1; sleep 60 &")
        assert (await run(sandbox, "kill -9 $PPID; echo killed")).out == "killed\n"
        assert (await run(sandbox, "echo $x; pgrep -c sleep")).out == "1\n1\n"
        assert (await run(sandbox, "exit 3")).code == 3
        ended = "while ps -C sleep -o stat= | grep -qv Z; do :; done"
        assert (await run(sandbox, f"echo $x; pkill sleep; {ended}")).out == "1\n"
        await run(sandbox, "x=2")
        assert (await run(sandbox, "echo $x; exit 4")).code == 4
        await sandbox.freeze()

    in_sandbox(data_dir, test)


@pytest.mark.usefixtures("shells")
@pytest.mark.parametrize("again", [False, True], ids=["no other anchor", "another anchor"])
def test_exit_code_of_a_process_whose_anchor_was_killed(data_dir: Path, again: bool) -> None:
    """The anchor that is started in its place does not know the process."""

    async def test(sandbox: Sandbox) -> None:
        await leave(sandbox, "echo up; until [ -e /tmp/end ]; do sleep 0.02; done; exit 7", tty=False, stdin=False)
        assert (await run(sandbox, "kill -9 $PPID; echo killed")).out == "killed\n"
        if again:
            assert (await run(sandbox, "exit 3")).code == 3
        assert (await run(sandbox, ": >/tmp/end; echo ended")).out == "ended\n"
        request = {"process": 7, "until": {"1": 0, "2": 0, "ended": True}}
        ended = await sandbox.execute(ToolCall("process", "attend", request))
        assert ending(ended.result.body).exit_code == 7

    in_sandbox(data_dir, test)


def test_background_output_comes_with_the_next_call(data_dir: Path) -> None:
    """The output of a server in the background comes with the next call."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "mkfifo /tmp/p; (cat /tmp/p >/dev/null; echo late; : > /tmp/said; cat /tmp/p) &")
        answer = await run(sandbox, "echo > /tmp/p; until [ -e /tmp/said ]; do sleep 0.01; done")
        assert answer.out == "late\n"

    in_sandbox(data_dir, test)


@pytest.mark.parametrize("held", ["exec 7</etc/passwd", "exec 3>/tmp/log", "exec 2>/tmp/log", "ipcmk -M 4096"])
def test_what_no_file_holds_counts_as_processes(data_dir: Path, held: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, held)
        assert Effect.PROCESSES in answer.effect
        assert answer.state is None
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()
        # What is behind it may be another now, though nothing shows.
        assert (await run(sandbox, "true")).effect is Effect.PROCESSES

    in_sandbox(data_dir, test)


def test_an_open_descriptor_works_in_the_next_call(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "printf 'none\\none\\ntwo\\n' > /tmp/f; exec 7</tmp/f")
        assert (await run(sandbox, "read -u 7")).effect == Effect.PROCESSES | Effect.SESSION
        assert (await run(sandbox, "read -u 7 line; echo $line")).out == "one\n"
        assert (await run(sandbox, "read -u 7 line; echo $line; exec 7<&-")).out == "two\n"
        await sandbox.freeze()

    in_sandbox(data_dir, test)


def test_long_output_is_cut_and_says_so(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, "head -c 300000 /dev/zero | tr '\\0' x; echo err >&2")
        assert answer.truncated
        assert answer.out.startswith("x" * 1000)
        assert answer.out.splitlines()[-1] == "[forkpoint: 299000 more bytes left out]"
        assert answer.err == "err\n"

    in_sandbox(data_dir, test, limits=Limits(output_bytes=1000))


def test_both_ends_of_a_long_output_can_be_kept(data_dir: Path) -> None:
    """The summary of a test run is at its end. The next call's output is whole again, and of each shell."""

    async def test(sandbox: Sandbox) -> None:
        for session in ("main", "other", "main"):
            answer = await run(sandbox, "seq 1 60000; echo 3 failed; seq 1 60000 >&2", session=session)
            head, _, tail = answer.out.partition("\n[forkpoint: 347903 more bytes left out]\n")
            assert (head[:6], len(head), tail[-9:], len(tail)) == ("1\n2\n3\n", 500, "3 failed\n", 500)
            assert answer.err.endswith("59999\n60000\n")
            assert answer.truncated
            assert (await run(sandbox, "seq 1 3", session=session)).out == "1\n2\n3\n"

    in_sandbox(data_dir, test, limits=Limits(output_bytes=1000, output_keep="ends"))


def test_output_is_cut_at_the_limit_each_time_alike(data_dir: Path) -> None:
    """Both streams end with a whole character, at limits around their size, in each sandbox and however they came."""
    text = "aé€𝄞" * 3
    pieces = "; ".join(f"printf '\\x{byte:x}' | tee /dev/stderr" for byte in text.encode())

    async def test(driver: Driver) -> None:
        for limit in (0, 1, 2, 3, 4, *range(len(text.encode()) - 5, len(text.encode()) + 2)):
            spec = EnvironmentSpec(limits=Limits(output_bytes=limit))
            answers = [
                await run(await driver.start(spec), command)
                for command in (f"printf %s {text} | tee /dev/stderr", pieces)
                for _ in range(2)
            ]
            kept = text.encode()[:limit].decode(errors="ignore")
            rest = len(text.encode()) - len(kept.encode())
            shown = f"{kept}\n[forkpoint: {rest} more bytes left out]\n" if rest else text
            for answer in answers:
                assert (answer.out, answer.err, answer.truncated) == (shown, shown, rest > 0), limit

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            await test(driver)

    asyncio.run(go())


@pytest.mark.parametrize("keep", ["head", "ends"])
def test_a_lost_shell_is_noticed_behind_a_long_output(data_dir: Path, keep: Literal["head", "ends"]) -> None:
    """The line by which it is known is beyond the limit of what is kept."""

    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, "head -c 3000 /dev/zero; ulimit -n 4")
        assert (answer.code, LOST in answer.err) == (1, True)

    in_sandbox(data_dir, test, limits=Limits(output_bytes=1000, output_keep=keep))


def test_invalid_utf8_becomes_replacement_characters(data_dir: Path) -> None:
    """Bytes that are not UTF-8 are shown as the replacement character."""

    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "printf 'a\\xffb'")).out == "a\ufffdb"
        assert (await run(sandbox, "x=$(printf '\\xff'); echo ${#x}")).out == "1\n"
        assert (await run(sandbox, "echo 'é☃'")).out == "é☃\n"

    in_sandbox(data_dir, test)


def printed_by_bash(dialogue: list[str], folder: Path) -> list[tuple[str, str]]:
    """Return what one bash in a directory prints to each stream for each command of a dialogue."""
    script = 'for command; do eval "$command"; printf "\\0"; printf "\\0" >&2; done'
    printed = subprocess.run(
        ["bash", "-c", script, "bash", *dialogue], cwd=folder, capture_output=True, text=True, check=False
    )
    return list(zip(printed.stdout.split("\0")[:-1], printed.stderr.split("\0")[:-1], strict=True))


REMOVED = [
    ["mkdir -p a/b; cd a/b; rm -rf ../../a", "pwd -P", "pwd", "x=1; pwd -P", "cd ..; x=2", "pwd; echo $x", "cd /; pwd"],
    ["mkdir -p a/b; cd a/b; rm -rf ../../a; pwd -P", "ls", "touch f", "pwd", "cd /; pwd -P"],
    ["mkdir -p a/b; cd a/b; mv ../../a ../../z", "pwd -P | grep -o '/z/b$'", "pwd | grep -o '/z/b$'", "cd ..; ls"],
]


@pytest.mark.usefixtures("shells")
@pytest.mark.parametrize("dialogue", REMOVED)
def test_a_session_in_a_removed_directory_goes_on(data_dir: Path, tmp_path: Path, dialogue: list[str]) -> None:
    async def test(sandbox: Sandbox) -> None:
        shown = [await run(sandbox, command) for command in dialogue]
        assert [(answer.out, answer.err) for answer in shown] == printed_by_bash(dialogue, tmp_path)

    in_sandbox(data_dir, test)


def test_a_removed_directory_has_one_name_without_its_shell(data_dir: Path) -> None:
    """The shell was ended by a timeout. Another rollout finds the same name, whatever its pids are."""

    async def test(sandbox: Sandbox) -> None:
        for before in ("true", "ls; ls; ls"):
            await run(sandbox, f"{before}; mkdir -p /tmp/a; cd /tmp/a; rm -r /tmp/a")
            assert (await run(sandbox, "sleep 60", timeout_s=0.2)).timed_out
            answer = await run(sandbox, "pwd; ls; touch f")
            assert (answer.out, answer.code) == ("/proc/self/fd/5\n", 1)
            assert (await run(sandbox, "cd /; pwd")).out == "/\n"

    in_sandbox(data_dir, test)


@pytest.mark.usefixtures("shells")
def test_bash_forgets_the_name_of_a_removed_directory(data_dir: Path) -> None:
    """After a failed `pwd -P`, `pwd` fails too. So the call changes the session, and a shell that comes later fails."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "mkdir /tmp/a; cd /tmp/a; rmdir /tmp/a")
        assert (await run(sandbox, "pwd")).outcome == ("/tmp/a\n", "", 0, Effect.NONE)
        assert Effect.SESSION in (await run(sandbox, "pwd -P")).effect
        forgotten = await run(sandbox, "pwd")
        assert (forgotten.out, forgotten.code, forgotten.effect) == ("", 1, Effect.NONE)
        assert (await run(sandbox, "sleep 60", timeout_s=0.2)).timed_out
        assert (await run(sandbox, "pwd")).code == 1

    in_sandbox(data_dir, test)


OPENED = {
    "one of ours before": ["exec 29>f; echo a >&29", "echo b >&29; cat f"],
    "where bash keeps copies": [
        'for n in {10..14}; do eval "exec $n>f$n"; done',
        'for n in {10..14}; do eval "echo $n >&$n"; done',
        "cat f??",
    ],
    "writes to all": ['for n in {3..200}; do eval "echo $n >&$n" 2>/dev/null; done; x=2', "echo $x"],
    "closes all": ['for n in {3..255}; do eval "exec $n>&-"; done; x=2', "echo $x"],
    "a low limit": ["ulimit -n 20; x=2; (exit 3)", "ulimit -n; echo $x"],
    "a reading end": ["seq 3 >f; exec 12<f; read -u 12 x", "read -u 12 y; echo $x $y"],
    "a copy of stdout": ["exec 11>&1; echo a >&11", "exec 11>&-; echo b"],
}


@pytest.mark.usefixtures("shells")
@pytest.mark.parametrize("name", OPENED)
def test_descriptors_are_those_of_one_bash(data_dir: Path, tmp_path: Path, name: str) -> None:
    """Ours are out of the way, and break no dump."""

    async def test(sandbox: Sandbox) -> None:
        outs = [(await run(sandbox, command)).out for command in OPENED[name]]
        assert outs == [out for out, _ in printed_by_bash(OPENED[name], tmp_path)]

    in_sandbox(data_dir, test)


@needs_forks
def test_programs_have_no_descriptor_of_ours(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        for command in ("ls /proc/self/fd", 'x=$(ls /proc/self/fd); echo "$x"', "bash -c 'exec ls /proc/self/fd'"):
            assert (await run(sandbox, command)).out == "0\n1\n2\n3\n"

    in_sandbox(data_dir, test)


UNFINISHED = [
    "x=5\n[[", "[[ a", "[[ a &&", "[[ ( a", "if [[ a", "f() { [[", "[[ a =~ (", "((", "(( 1 +", "echo $((", "case a in",
    "case a in b", "echo 'a", 'echo "a', "echo `a", "echo $(a", "echo ${a", "f() {", "for i in 1", "a=(1", "echo a |",
    "fi", "cat <<E\nx",
]  # fmt: skip


@pytest.mark.usefixtures("shells")
@pytest.mark.parametrize("command", UNFINISHED)
def test_errors_of_unfinished_words_are_bash_s_own(data_dir: Path, tmp_path: Path, command: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        for before in ("true", "sleep 1000 &"):
            # In a shell that is replaced, and in one that stays.
            await run(sandbox, before)
            answer = await run(sandbox, command)
            assert [(answer.out, answer.err)] == printed_by_bash([command], tmp_path)
            assert (await run(sandbox, "[[ a == a ]] && echo fine")).out == "fine\n"

    in_sandbox(data_dir, test)


def test_a_trace_in_a_file_shows_two_lines_of_ours(data_dir: Path) -> None:
    """Bash has no way to end a trace unseen, and no option tells afterwards whether there was one."""

    async def test(sandbox: Sandbox) -> None:
        for command in ("exec 7>/tmp/t; BASH_XTRACEFD=7; set -x; echo a", "echo b", "set +x"):
            assert (await run(sandbox, command)).err == ""
        lines = (await run(sandbox, "cat /tmp/t")).out.splitlines()
        ours = [line for line in lines if "__session" in line or "builtin" in line]
        assert [line.lstrip("+ ") for line in lines if line not in ours] == ["echo a", "echo b", "set +x"]
        assert len(ours) == 4

    in_sandbox(data_dir, test)


def test_arguments_that_are_too_long_are_refused_in_docker_s_words(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        for argv in (("bash", "-c", "echo " + 200_000 * "a"), ("true", *(1000 * ["b" * 10_000]))):
            refused = await ran(sandbox, *argv, cwd="/")
            assert refused.out.decode() == (
                "OCI runtime exec failed: exec failed: unable to start container process: "
                f"exec {argv[0]}: argument list too long: unknown\r\n"
            )
            assert (refused.err, refused.ending.exit_code) == (b"", 126)
        assert (await ran(sandbox, "echo", 100_000 * "a", cwd="/")).out == 100_000 * b"a" + b"\n"

    in_sandbox(data_dir, test)


@pytest.mark.parametrize(
    "hostile",
    [
        "builtin() { :; }",
        "declare() { echo fake; }; printf() { echo fake; }; trap() { :; }; eval() { :; }",
        "alias builtin=false; alias printf=false; alias eval='exit 9'",
        "trap 'echo trapped' DEBUG; trap 'echo failed' ERR; false",
        "set -x; set -v",
        "set -n",
        "set -o posix",
        "enable -n printf declare",
        "BASH_XTRACEFD=1004; set -x",
        *(f"exec {fd}>&-" for fd in range(1000, 1005)),
        "exec 1001<&- 1002<&- 1003<&-",
        "exec 1001</dev/zero",
        "readonly __session=1",
        "for fd in {1000..1004}; do echo forged >&$fd; done 2>/dev/null",
        "unset -f $(compgen -A function); unset $(compgen -v) 2>/dev/null",
        "POSIXLY_CORRECT=1",
        "PS4='$(touch /tmp/ps4)'; set -x",
        "ulimit -f 0",
    ],
)
def test_a_hostile_session_breaks_at_most_itself(data_dir: Path, hostile: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, hostile, timeout_s=1.0)
        assert (await run(sandbox, "echo fine", session="other")).out == "fine\n"
        await run(sandbox, "echo whatever", timeout_s=1.0)
        assert sandbox.alive

    in_sandbox(data_dir, test)


@pytest.mark.parametrize(
    ("before", "after", "out"),
    [
        ("cd /tmp", "mkdir a; cd a; touch in; mv ../a ../b", "in\n/tmp/a\n"),
        ("mkdir /tmp/a; cd /tmp/a", "rmdir /tmp/a; mkdir /tmp/a; touch /tmp/a/other", "/tmp/a\n"),
        ("mkdir -p /tmp/a/in /tmp/b; ln -s a /tmp/l; cd /tmp/l", "ln -sfn b /tmp/l", "in\n/tmp/l\n"),
    ],
)
def test_a_session_stays_in_its_directory(data_dir: Path, before: str, after: str, out: str) -> None:
    """The directory loses its name. The session stays in it, and its state has no digest: files cannot hold it."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, before)
        moved = await run(sandbox, after)
        assert (moved.state, Effect.PROCESSES in moved.effect) == (None, True)
        for _ in range(2):
            assert (await run(sandbox, "ls; pwd")).outcome == (out, "", 0, Effect.NONE)
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()
        assert (await run(sandbox, "cd /tmp")).state is not None
        await sandbox.freeze()

    in_sandbox(data_dir, test)


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$", "sleep 20"])
def test_a_session_never_goes_on_in_the_root_directory(data_dir: Path, end: str) -> None:
    """The directory is removed and then the shell ends. `rm -rf *` in the next call removes nothing of the system."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "mkdir /tmp/a; cd /tmp/a; x=1")
        await run(sandbox, "rmdir /tmp/a")
        await run(sandbox, end, timeout_s=0.5)
        assert (await run(sandbox, "rm -rf * ./*; touch new; echo $x; ls /etc/passwd")).out == "1\n/etc/passwd\n"

    in_sandbox(data_dir, test)


def test_a_new_session_needs_its_directory(data_dir: Path) -> None:
    """A new session whose directory was removed does not begin elsewhere; older sessions go on."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "x=1; cd /tmp; mv /root /tmp/root")
        refused = await run(sandbox, "rm -rf *", session="other")
        assert (refused.code, "the directory /root is gone" in refused.err) == (127, True)
        assert (await run(sandbox, "echo $x; ls -d /etc")).out == "1\n/etc\n"

    in_sandbox(data_dir, test)


def test_a_shell_that_commands_broke_is_an_answer(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sandbox's own bash runs the commands and is gone, every rollout that does the same gets the same."""
    execute_shells(monkeypatch)

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "rm -f /bin/bash /usr/bin/bash")
        for _ in range(2):
            refused = await run(sandbox, "echo on")
            assert (refused.code, refused.err.startswith("/bin/bash does not start")) == (127, True)

    in_sandbox(data_dir, test)


@pytest.mark.parametrize("call", ["set -r", "declare -i v='1'; v='2+2'", "POSIXLY_CORRECT=1", "TMOUT=1"])
def test_a_session_goes_on_after(data_dir: Path, call: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, call, timeout_s=3.0)
        assert (await run(sandbox, "echo on $POSIXLY_CORRECT")).out.startswith("on")

    in_sandbox(data_dir, test)


CLOSE_ALL = 'for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ $fd -lt 3 ] || eval "exec $fd>&-"; done'
LOST = "[forkpoint: the session stays as it was before this call: the command has closed all descriptors"


@pytest.mark.usefixtures("shells")
@pytest.mark.parametrize(
    "command", ["ulimit -n 4", f"exec >/tmp/out; {CLOSE_ALL}", "set -a; ulimit -n 1", CLOSE_ALL], ids=range(4)
)
def test_a_shell_that_lost_our_descriptors_keeps_its_session(data_dir: Path, command: str) -> None:
    """One bash would go on. The answer says so, and shows nothing of our script."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "x=kept")
        answer = await run(sandbox, f"x=lost; echo said; {command}")
        assert (answer.code, answer.out) == (1, "said\n")
        assert LOST in answer.err
        assert not re.search(r"session-lost|/proc/self/fd|1000: ", answer.err)
        assert (await run(sandbox, "echo $x")).out == "kept\n"

    in_sandbox(data_dir, test)


def test_a_low_limit_of_descriptors_in_a_subshell_is_a_result(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, "(ulimit -n 5; ulimit -n); exit 144")
        assert (answer.out, answer.code) == ("5\n", 144)

    in_sandbox(data_dir, test)
