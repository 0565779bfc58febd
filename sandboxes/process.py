"""A process of its own in a sandbox: the frames that its output comes in, and the text that becomes it (pure).

`ToolCall("process", "run", {"argv", "env", "cwd", "user", "tty", "timeout_s"?, "detach"?}, stdin)` runs one, as
`docker exec` does: not in a session, with an environment of its own. The answer is a sequence of frames.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEDIA_TYPE = "application/vnd.forkpoint.process"
OUT, ERR, END = 1, 2, 3
"""Kinds of frames: stdout (all output of a terminal), stderr, and last what `Ending` says, as JSON."""
MOST_BYTES = 32 << 20
"""Of output that is recorded; what is more passes to who listens."""
LINGER_S = 2.0
"""How long output is read after a process ended, where what it left behind holds its pipes: Docker's own time."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TEXT_FD = 29
PROGRAM = f". /proc/self/fd/{TEXT_FD}"
"""What the bash is given that becomes the process; the text stands behind this descriptor: it may be long."""
_HEADER = struct.Struct(">BxxxI")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended. exit_code: 128 + its number for a signal; None for one that goes on, detached or left.

    truncated: more output came than is recorded. signal: the number of the one that was sent to it, and ended it.
    """

    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    signal: int = 0


def frame(kind: int, data: bytes) -> bytes:
    """Return one frame: Docker's header of 8 bytes, then the data."""
    return _HEADER.pack(kind, len(data)) + data


def frames(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and data of each frame of a whole answer."""
    at = 0
    while at < len(body):
        kind, length = _HEADER.unpack_from(body, at)
        at += _HEADER.size
        yield kind, body[at : at + length]
        at += length


def output(body: bytes, kind: int) -> bytes:
    """Return what came on one stream of an answer."""
    return b"".join(data for found, data in frames(body) if found == kind)


def by_stream(body: bytes) -> bytes:
    """Return an answer's streams one after the other: in which order they came depends on the moment."""
    return b"".join(frame(kind, output(body, kind)) for kind in (OUT, ERR, END))


def ending(body: bytes) -> Ending:
    """Return what an answer's last frame says."""
    told: dict[str, Any] = {}
    for kind, data in frames(body):
        if kind == END:
            told = json.loads(data)
    return Ending(told["exit_code"], told["timed_out"], told["truncated"], told.get("signal", 0))


class Frames:
    """What has come of a process's output: neighbours on one stream are one frame, however they came."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._body = bytearray()
        self._size = self._at = self._kind = 0

    @property
    def size(self) -> int:
        """How many bytes came."""
        return self._size

    @property
    def whole(self) -> bool:
        """Whether all of it was kept."""
        return self._size <= self._most

    def add(self, kind: int, data: bytes) -> None:
        """Take what came next."""
        room = max(0, self._most - self._size)
        self._size += len(data)
        data = data[:room]
        if not data:
            return
        if kind != self._kind:
            self._kind, self._at = kind, len(self._body)
            self._body += _HEADER.pack(kind, 0)
        self._body += data
        _HEADER.pack_into(self._body, self._at, kind, len(self._body) - self._at - _HEADER.size)

    def end(self, exit_code: int | None, *, timed_out: bool = False) -> bytes:
        """Return the whole answer."""
        told = {"exit_code": exit_code, "timed_out": timed_out, "truncated": not self.whole}
        return bytes(self._body) + frame(END, json.dumps(told).encode())


class Incoming:
    """Takes frames out of the pieces in which they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the frames that are whole now."""
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            piece = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            yield kind, piece


def refusal(argv: object, env: object) -> str:
    """Say what keeps these from being a process's; empty where nothing does."""
    if not (isinstance(argv, Sequence) and argv and all(isinstance(word, str) and "\0" not in word for word in argv)):
        return "argv must be a list of words without NUL, the program first"
    if not isinstance(env, Mapping) or any("\0" in f"{name}{value}" or "=" in name for name, value in env.items()):
        return "env must map names without = to values, both without NUL"
    return ""


def environment(base: Mapping[str, str], given: Mapping[str, str], host: str, *, tty: bool) -> dict[str, str]:
    """Return what a process is started with but HOME, in Docker's order: base's, then the call's own."""
    told = {"PATH": PATH, "HOSTNAME": host} | ({"TERM": "xterm"} if tty else {})
    return {**told, **base, **given}


def text(
    fields: Mapping[str, Any], env: Mapping[str, str], *, uid: int, places: str, ready: str = ":", terminal: str = ""
) -> bytes:
    """Return what a POSIX shell does to become the process of fields, or to say as Docker does why it cannot.

    uid: whose process the shell is. places: redirections that make its streams; ready: said once they are open.
    terminal: the path of the one that it is to have as its controlling terminal.
    """
    facts = {
        "cwd": fields["cwd"], "user": fields.get("user") or "", "uid": str(uid), "terminal": terminal,
        "quiet": "yes" if fields.get("detach") else "",
    }  # fmt: skip
    # As bytes in latin-1: what quotes them sees characters that are one byte each.
    known = (f"fp_{name}={quote(_bytes(value))}" for name, value in facts.items())
    words = " ".join(quote(_bytes(word)) for word in fields["argv"])
    given = " ".join(quote(_bytes(f"{name}={value}")) for name, value in env.items())
    home = "" if "HOME" in env else ' "HOME=$fp_home"'
    lines = (
        "printf 0 2>/dev/null >/proc/self/oom_score_adj", f"exec {places}", ready, *known, f"PATH={quote(env['PATH'])}",
        f"set -- {words}", _LOOK, f'set -- "$fp_env" -i {given}{home} "$@"', _BECOME,
    )  # fmt: skip
    return ("\n".join(lines) + "\n").encode("latin-1")


def terminal_text(argv: Sequence[str], terminal: str, *, places: str, ready: str) -> bytes:
    """Return what a POSIX shell does to become argv, with the terminal at this path as its controlling one."""
    words = " ".join(quote(_bytes(word)) for word in argv)
    lines = (f"exec {places}", ready, f"set -- {words}", f"fp_terminal={quote(terminal)}", _ON_TERMINAL, 'exec "$@"')
    return ("\n".join(lines) + "\n").encode("latin-1")


def quote(word: str) -> str:
    """Return word as one word of any POSIX shell."""
    return "'" + word.replace("'", "'\\''") + "'"


def _bytes(word: str) -> str:
    return word.encode(errors="surrogateescape").decode("latin-1")


_LOOK = r"""
fp_fail() {
    printf 'OCI runtime exec failed: exec failed: unable to start container process: %s: unknown\r\n' "$1"
    exit 126
}
fp_name=${fp_user%%:*} fp_group= fp_to= fp_gid=0 fp_home=/ fp_groups=
case $fp_user in *:*) fp_group=${fp_user#*:};; esac
if [ -z "$fp_name" ]; then fp_name=$fp_uid; fi
if [ -r /etc/passwd ]; then
    while IFS=: read -r fp_1 fp_2 fp_3 fp_4 fp_5 fp_6 fp_7 || [ -n "$fp_1" ]; do
        if [ "$fp_1" = "$fp_name" ] || [ "$fp_3" = "$fp_name" ]; then
            fp_name=$fp_1 fp_to=$fp_3 fp_gid=$fp_4 fp_home=$fp_6
            break
        fi
    done </etc/passwd
fi
if [ -z "$fp_to" ]; then
    case $fp_name in
    *[!0-9]*) printf 'unable to find user %s: no matching entries in passwd file\r\n' "$fp_name"; exit 126;;
    esac
    fp_to=$fp_name
fi
fp_found=
if [ -r /etc/group ]; then
    while IFS=: read -r fp_1 fp_2 fp_3 fp_4 || [ -n "$fp_1" ]; do
        if [ -n "$fp_group" ]; then
            if [ "$fp_1" = "$fp_group" ] || [ "$fp_3" = "$fp_group" ]; then fp_found=$fp_3; break; fi
        else
            case ",$fp_4," in *",$fp_name,"*) fp_groups=$fp_groups,$fp_3;; esac
        fi
    done </etc/group
fi
if [ -n "$fp_group" ]; then
    case $fp_found$fp_group in
    *[!0-9]*) if [ -z "$fp_found" ]; then
            printf 'unable to find group %s: no matching entries in group file\r\n' "$fp_group"; exit 126
        fi;;
    esac
    fp_gid=${fp_found:-$fp_group}
fi
case $fp_cwd in
/*) ;;
*) printf 'OCI runtime exec failed: exec failed: Cwd must be an absolute path: unknown\r\n'; exit 126;;
esac
cd -- "$fp_cwd" 2>/dev/null ||
    fp_fail "chdir to cwd (\"$fp_cwd\") set in config.json failed: no such file or directory"
case $1 in
*/*)
    if [ ! -e "$1" ]; then fp_fail "exec: \"$1\": stat $1: no such file or directory"; fi
    if [ -d "$1" ] || [ ! -x "$1" ]; then fp_fail "exec: \"$1\": permission denied"; fi;;
*)
    fp_rest=$PATH: fp_found=
    while [ -n "$fp_rest" ]; do
        fp_1=${fp_rest%%:*} fp_rest=${fp_rest#*:}
        if [ -x "${fp_1:-.}/$1" ] && [ ! -d "${fp_1:-.}/$1" ]; then fp_found=yes; break; fi
    done
    if [ -z "$fp_found" ]; then fp_fail "exec: \"$1\": executable file not found in \$PATH"; fi;;
esac
case $1 in *=*) set -- /bin/sh -c 'exec "$0" "$@"' "$@";; esac
fp_env=/usr/bin/env
if [ ! -x "$fp_env" ]; then fp_env=/bin/env; fi
"""
"""Whose process, where, and whether its program is there: all of it read inside, where no link leads out.

Texts and the exit code are those of Docker 20.10 with runc 1.1."""

_ON_TERMINAL = r"""
if [ -n "$fp_terminal" ] && PATH=/usr/bin:/bin command -v setsid >/dev/null 2>&1; then
    exec 2>/dev/null
    (PATH=/usr/bin:/bin; exec setsid /bin/sh -c 'exec 0<>"$0" 1>&0 2>&0; exec "$@"' "$fp_terminal" "$@")
    exit "$?"
fi
"""
"""A terminal is its session's: whoever opens one as the first of a new session has it.
Without `setsid` the process has it as its streams alone. Who waits for it says nothing there of how it ended."""

_BECOME = (
    r"""
if [ "$fp_to" != "$fp_uid" ] || [ -n "$fp_group" ]; then
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    case $(setpriv --help 2>&1) in
    *--reuid*) set -- setpriv "--reuid=$fp_to" "--regid=$fp_gid" "--groups=$fp_gid$fp_groups" "$@";;
    *) case $(chroot --help 2>&1) in
        *--userspec*) set -- chroot "--userspec=$fp_to:$fp_gid" "--groups=$fp_gid$fp_groups" --skip-chdir / "$@";;
        *) set -- su -s /bin/sh -c 'exec "$0" "$@"' "$fp_name" "$@";;
        esac;;
    esac
fi
"""
    + _ON_TERMINAL
    + r"""if [ -n "$fp_quiet" ]; then exec >/dev/null 2>&1; fi
exec "$@"
"""
)
"""The last steps."""
