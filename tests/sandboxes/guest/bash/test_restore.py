"""A session that goes from shell to shell equals one plain bash that stays."""

import os
import resource
from pathlib import Path

import pytest
from hypothesis import assume, given, settings

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.bash.restore import restore_script, split_functions
from sandboxes.guest.performed import not_started
from sandboxes.guest.survivors import kept
from sandboxes.ipc.messages import CommandOutcome
from tests.sandboxes.guest.bash import session_programs
from tests.sandboxes.guest.bash.shell_runs import PROBE, RestoredRuns, plain, restored

EXAMPLES = int(os.environ.get("SESSION_EXAMPLES", "15"))
"""How many random sessions are run; thousands take minutes."""

PROGRAMS = [
    # Attributes act on assignments to come, not on the value that is there.
    ["month=08; declare -i month", "echo $month", "month=5+5; echo $month"],
    ["v=abc; declare -u v", "echo $v; v=def; echo $v"],
    ["v='a b'; declare -i v; w=XY; declare -l w", "echo $v $w"],
    ["declare -ir c=5; declare -ar ra=(1 2); declare -Ax ma=([k]=v); declare -it t=3; declare -c cc=abc", "c=6", "c=7"],
    ["declare -x nov; declare -a noa; declare -i noi; declare nn; declare -r nr", "declare -p nov noa noi nn nr"],
    ["declare -a s=([5]=x [100]='y z'); declare -A m=([@]=1 ['a]b']=2 ['$x']=3)", 'echo "${!s[@]} ${m[a]b]}"'],
    ["declare -n r=t; t=5", "echo $r; r=6; echo $t", "unset r; echo ${t-none}"],
    ["declare -n a=b; declare -n b=c; c=1; declare -n e", "echo $a; a=2; echo $c"],
    ["x=$(printf '\\377\\001\\200'); y=$'a\\nb\\'c'", 'printf %s "$x$y" | od -An -tx1'],
    ["LC_ALL=C; x=$'\\303\\251'", "echo $x ${#x}"],
    ["x=$(printf '%100000s' y)", "echo ${#x}"],
    ["unset RANDOM; RANDOM=5", "echo $RANDOM"],
    ["unset SHELL", "echo [${SHELL-none}]", "SHELL=/bin/other", "echo $SHELL; env | grep -c ^SHELL="],
    ["unset SECONDS DIRSTACK", "echo [$SECONDS]; pushd /usr"],
    ["export SHELLOPTS UID", "sh -c 'echo $SHELLOPTS $UID'"],
    ["BASH_ARGV0=foo", "echo $0"],
    # Variables that are tied to options.
    ["POSIXLY_CORRECT=1", "echo $POSIXLY_CORRECT"],
    ["readonly POSIXLY_CORRECT=3", "echo $POSIXLY_CORRECT"],
    ["export POSIXLY_CORRECT=1; alias a=b", "echo $POSIXLY_CORRECT", "unset POSIXLY_CORRECT; shopt -q expand_aliases"],
    ["IGNOREEOF=3", "echo $IGNOREEOF"],
    ["GLOBIGNORE='*.o'; shopt -u dotglob", "shopt dotglob"],
    ["shopt -s compat42", "echo $BASH_COMPAT", "BASH_COMPAT=31"],
    ["TMOUT=1", "echo $TMOUT"],
    # A restricted shell stays one.
    ["set -r", "cd /; echo $?", "echo hi > file; echo $?", "PATH=/"],
    ["set -o posix; f() { echo f; }", "f; trap 'echo u' USR1; trap -p"],
    # A function names its lines and its source as in the shell that defined it, not the script that restores it.
    [
        "f() {\n    echo $LINENO ${BASH_SOURCE[*]}\n    caller 0\n    (: ${nosuch?bad}) 2>&1\n}",
        "shopt -s extglob; x=1",
        "g() {\n    [[ $1 == @(a|'b\"c') ]] && f\n}",
        "f; shopt -u extglob",
        "g a; shopt extglob; export -f f",
        "bash -c f",
    ],
    ["set -aeu; x=1", "echo $x"],
    ["set -f; set -C; set -b; set -m; set -h +B", "echo {1,2} *"],
    ["PS4='$(echo p)+'; set -x", "echo hi"],
    ["trap 'echo e' EXIT; trap 'x=$x.' ERR; trap ': dbg' DEBUG; trap '' USR1; trap 'echo r' RETURN", "false; echo $x"],
    ["enable -n test times", "enable -n"],
    # Builtins that our own lines need are disabled for the command alone.
    [
        "enable -n read set unset trap umask pwd hash jobs alias; x=1",
        "pwd; echo $x; set",
        "enable -a >/dev/null; enable pwd set",
    ],
    [
        'set -a; enable -n exit; x=1; f() { enable "$@"; }',
        "env | grep forkpoint; echo $x; f exit",
        "echo $x; f -n test",
    ],
    ["umask 027; ulimit -S -n 100; set -- a 'b c' ''", 'echo $# "$@"'],
    # What a command redefines.
    ["alias umask='echo no'; alias '{'='echo brace'; alias '[['='echo br'; alias eval='echo ev'", "umask"],
    [
        'for f in umask shopt set unset eval cd printf declare trap alias pushd; do eval "$f() { echo $f; }"; done',
        "umask; \\set; cd /; declare x=1",
    ],
    # Functions whose printed form bash reads in another way.
    ["function a=b { echo ab; }; f() { cat <<E\n$1 () \nE\n}; g() ( echo sub )", "a=b; f 1; 'a=b'; g"],
    ["shopt -s extglob; f() { [[ ab == +(a|b) ]] && echo m; }; shopt -u extglob", "f"],
    ["f() { echo x; }; declare -ft f; export -f f; readonly -f f; function if { echo y; }", "f; declare -F; \\if"],
    # Directories.
    ["mkdir a; cd a; echo in > file", "mv ../a ../b", "ls; pwd; cd ..; pwd; ls"],
    [
        "mkdir g; cd g",
        "rmdir ../g",
        "touch x; echo $?; pwd",
        "mkdir ../g; ls; pwd; touch y; echo $?",
        "cd ../g; touch y; ls",
    ],
    ["mkdir g; cd g", "rmdir ../g; mkdir ../g; touch ../g/new", "ls; touch x; echo $?", "ls ../g"],
    ["mkdir d1 d2; touch d1/one d2/two; ln -s d1 cur; cd cur", "ln -sfn d2 ../cur", "ls; pwd; pwd -P; cd .; ls"],
    ["mkdir -p p/q; cd p/q", "mv ../../p ../../z", "pwd; ls ..; cd ..; pwd"],
    ["mkdir -p p/q/r; cd p/q; pushd r >/dev/null", "mv ../../q ../../z", "popd; pwd"],
    ["mkdir -p p/q; cd p/q; cd ..", "rmdir q", "cd -; pwd"],
    ["mkdir 'a\nb'; cd 'a\nb'; pushd / >/dev/null; pushd /usr >/dev/null", "dirs; popd; popd; pwd"],
    ["PWD=/nonsense", "pwd; echo $PWD; cd ..; pwd"],
    ["OPTIND=3; readonly PWD OLDPWD", "echo $OPTIND; cd /usr; pwd"],
    ["cd -P /opt; CDPATH=/usr; cd bin", "cd -; cd -"],
    ["set -o physical; ln -s /usr u; cd u", "pwd; cd ..; pwd"],
]


@pytest.mark.parametrize("calls", PROGRAMS, ids=[" | ".join(calls)[:60].replace("\n", "~") for calls in PROGRAMS])
def test_restored_shells_equal_one_plain_bash(tmp_path: Path, calls: list[str]) -> None:
    """Each call prints what it prints in one bash, and so does a look at the whole session in the end."""
    calls = [*calls, PROBE]
    assert restored(calls, tmp_path / "w") == plain(calls, tmp_path / "w")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (["builtin() { echo mine; }", "x=5; builtin cd /", "echo $x"], [b"", b"mine\n", b"5\n"]),
        (
            ['builtin() { echo mine; command builtin "$@"; }; set -e', "builtin echo hi", "unset -f builtin", "echo"],
            [b"", b"mine\nhi\n", b"", b"\n"],
        ),
        (["builtin() { echo q; }; exec 3>f", "builtin", "exec 3>&-", "builtin"], [b"", b"q\n", b"", b"q\n"]),
    ],
)
def test_a_function_may_replace_the_word_builtin(tmp_path: Path, calls: list[str], expected: list[bytes]) -> None:
    """The dump's own lines do not call it, and the session keeps it, in its own shell and in a restored one."""
    with RestoredRuns(tmp_path / "w") as runs:
        assert [runs.call(call) for call in calls] == expected


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (
            ["enable -n printf; x=1", "echo $x; printf hi; echo $?; enable -n", "enable printf; printf $x"],
            [b"", b"1\nhi0\nenable -n printf\n", b"1"],
        ),
        (
            ["enable -n eval declare shopt; x=1", "x=$((x+1)); eval : 2>&-; echo $x $?", "enable eval; eval 'echo $x'"],
            [b"", b"2 127\n", b"2\n"],
        ),
        (
            ["enable -n builtin; x=1", "builtin : 2>&-; echo $? $x", "enable builtin; builtin echo $x"],
            [b"", b"127 1\n", b"1\n"],
        ),
    ],
)
def test_builtins_that_the_dump_needs_may_be_disabled(tmp_path: Path, calls: list[str], expected: list[bytes]) -> None:
    """They are disabled while commands run, as in one bash, and no change of the session is lost."""
    with RestoredRuns(tmp_path / "w") as runs:
        assert [runs.call(call) for call in calls] == expected


def test_a_directory_that_another_session_moves_stays(tmp_path: Path) -> None:
    """The other session's shell waits in the directory; after the move its name leads nowhere."""
    with RestoredRuns(tmp_path / "w") as runs:
        runs.call("mkdir a; cd a; echo in > file")
        runs.call("mv a b", session="other")
        assert kept(runs.shells) == {("session", "main")}
        assert runs.call("ls") == b"file\n"
        runs.call("cd ../b")
        assert not kept(runs.shells)


def test_a_killed_shell_never_comes_back_in_another_directory(tmp_path: Path) -> None:
    """The directory is gone, and so is the shell that stood in it: the next one stands where nothing can be removed."""
    with RestoredRuns(tmp_path / "w") as runs:
        runs.call("mkdir a; cd a; x=1")
        runs.call("rmdir ../a")
        runs.shells.kill(runs.shells.ready("main"))
        assert runs.call("touch new 2>/dev/null; echo $? $x; rm -rf ./* 2>/dev/null; ls ..", "main").startswith(
            b"1 1\n"
        )
        assert Path("/usr/bin").is_dir()


def test_a_function_that_bash_misprints_stays_in_its_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fresh shell can read it, so the session goes on in the shell that has it."""
    monkeypatch.setattr("sandboxes.guest.bash.restore.split_functions", lambda _text: ["f () \n{ \n    )\n}\n"])
    with RestoredRuns(tmp_path / "w") as runs:
        runs.call("f() { echo mine; }")
        assert kept(runs.shells) == {("session", "main")}
        assert runs.call("f") == b"mine\n"


def test_a_failed_restore_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dump's script fails, but a new session's shell starts. The fault is ours, and the call has no result.

    If a new one fails too, a command has broken the shell, and that is the answer.
    """
    with RestoredRuns(tmp_path / "w") as runs:
        runs.call("x=1")
        runs.shells.kill(runs.shells.ready("main"))
        place = "sandboxes.guest.shells.restore_script"
        monkeypatch.setattr(place, lambda session, *more: b"exit 3" if session else restore_script(session, *more))
        with pytest.raises(ShellStartError) as ours:
            runs.shells.ready("main")
        with pytest.raises(ShellStartError):
            not_started(ours.value)
        monkeypatch.setattr(place, lambda *_: b"exit 3")
        with pytest.raises(ShellStartError) as theirs:
            runs.shells.ready("main")
        assert isinstance(not_started(theirs.value).outcome, CommandOutcome)


def test_limits_are_set_once_bash_runs(tmp_path: Path) -> None:
    """An execve that is under way takes the limit of the stack with it, and would undo one that was set meanwhile."""
    with RestoredRuns(tmp_path / "w") as runs:
        runs.call("ulimit -S -s 4096")
        (starting,) = runs.shells
        assert starting.baseline is None
        assert resource.prlimit(starting.pid, resource.RLIMIT_STACK)[0] != 4096 << 10
        assert runs.call("ulimit -s") == b"4096\n"


def test_functions_are_split_at_their_heads() -> None:
    text = "a () \n{ \n    cat <<E\nb () \n{ \nE\n\n}\nb () \n{ \n    :\n}\nfunction if () \n{ \n    :\n}\n"
    first, second, third = split_functions(text)
    assert (first + second + "function " + third) == text
    assert (second[:4], third[:5]) == ("b ()", "if ()")


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 100, database=None)
@given(session_programs.calls)
def test_random_sessions_equal_one_plain_bash(tmp_path_factory: pytest.TempPathFactory, calls: list[str]) -> None:
    """Variables, attributes, options, functions, traps and directories change in any order."""
    folder = tmp_path_factory.getbasetemp() / "random" / "w"
    calls = ["base=$PWD; declare -A map; readonly base", *calls, PROBE]
    expected = plain(calls, folder)
    # An error that ends a bash without a terminal ends the call alone in a sandbox.
    assume(len(expected) == len(calls))
    assert restored(calls, folder) == expected
