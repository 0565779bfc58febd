"""Commands in sandboxes of images and by `docker exec`, in six kinds of images: `python -m bench.images`.

The kinds are Debian, Ubuntu, a RHEL-like and an Alpine-like (musl) root, busybox alone, and a root of two programs.
Each command runs in `sh` of the image (`docker exec` through both), and in a session. Beside the session runs
`docker exec` of the image's bash or, if it has none, of Debian's `bash-static`, mounted there. Output, errors and exit
codes must be equal, but for the differences in `REASONS`; it exits with 1 otherwise. It makes the images of Debian's
packages and starts a Docker daemon of its own. Ten minutes.
"""

import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import docker
import httpx
from rich.table import Table

from bench.machine import console, machine
from sandboxes.linux.files import remove_tree
from tests.dockerd import Dockerd, dockerd
from tests.machine import Proxy, data_directory, served
from tests.sandboxes.image_kinds import KINDS, ImageKind

Answer = tuple[str, str, int]
STATIC_BASH, BASH_INSIDE = "/bin/bash-static", "/dev/.shell/bash"
EXEC, SESSION = "exec", "session"

COMMANDS = {
    # Files.
    "root": "ls -a /",
    "modes": "stat -c '%n %a %u:%g %F' / /tmp /var/tmp /root /home /etc /dev /dev/shm /run /proc /sys",
    "write": "echo one > /tmp/f && cat /tmp/f; ln -s f /tmp/g; readlink /tmp/g; ls -l /tmp/g | cut -c1-9; rm /tmp/[fg]",
    "umask": "umask; (umask 027; : > /tmp/u; mkdir /tmp/v); stat -c '%a' /tmp/u /tmp/v; rm -r /tmp/u /tmp/v",
    "hard link": "(cd /tmp && echo x > a && ln a b && stat -c %h a b && rm a b)",
    "fifo": "mkfifo /tmp/p && (echo through > /tmp/p & cat /tmp/p); rm -f /tmp/p",
    "mknod": "mknod /tmp/null c 1 3; echo x > /tmp/null; ls -l /tmp/null | cut -c1-10; rm -f /tmp/null",
    "block device": "mknod /tmp/disk b 7 0; head -c 1 /tmp/disk; rm -f /tmp/disk",
    "shared memory": "echo x > /dev/shm/x && cat /dev/shm/x; rm /dev/shm/x",
    "links up": "ln -s /etc/../etc/passwd /tmp/l; head -n 1 /tmp/l; rm /tmp/l; readlink /tmp/l",
    "release": "cat /etc/os-release /etc/alpine-release /etc/redhat-release | head -n 4",
    "hosts": "cat /etc/hosts; cat /etc/hostname",
    "resolver": "cat /etc/resolv.conf",
    "mtab": "readlink /etc/mtab; readlink /proc/mounts",
    "docker's mark": "ls -l /.dockerenv | cut -c1-10",
    "disk": "df -P / /tmp | awk '{print $1, $6}'",
    # Users.
    "id": "id; whoami; groups; logname",
    "own files": "touch /tmp/own && stat -c '%u:%g' /tmp/own; rm /tmp/own",
    "home": "echo ~; echo ~root ~nobody ~no-such-user; (cd && pwd)",
    "su": "su -s /bin/sh nobody -c 'id -u; pwd'",
    "su to a user": "su app -c id; su guest -c id; su ubuntu -c id",
    "sudo": "sudo -n id -u",
    "setpriv": "setpriv --reuid 65534 --regid 65534 --clear-groups id",
    "denied": "wc -c < /etc/shadow; : > /etc/own; ls -d /etc/own; rm -f /etc/own; ls /root; kill -9 1; mkdir /proc/x",
    "chown": "touch /tmp/c; chown 12:34 /tmp/c && stat -c '%u:%g' /tmp/c; rm -f /tmp/c",
    "set-uid": "cp $(command -v id) /tmp/id && chmod 4755 /tmp/id && stat -c %A /tmp/id; rm -f /tmp/id",
    "set-uid as another": "(cd /tmp && printf '#!/bin/sh\\nid -u\\n' > s && chmod 4755 s && ./s && rm s)",
    "privileges": "grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status",
    "uid map": "cat /proc/self/uid_map /proc/self/setgroups",
    # Environment and shell.
    "env": "env | sort",
    "path": "echo $PATH; command -v sh ls cat",
    "directory": "pwd; echo $PWD; readlink /proc/self/cwd",
    "arguments": 'echo "$0" $# ; echo $-',
    "quoting": 'printf \'%s|\' "a b" \'c"d\' e\\ f "$(printf \'x\\ny\')"; echo; echo "tab\tend"',
    "missing program": "no-such-program; echo $?; /no/such/program; echo $?",
    "no permission to run": "echo hi > /tmp/r; /tmp/r; echo $?; /tmp; echo $?; rm /tmp/r",
    "wrong format": "printf '\\177ELFnope' > /tmp/w; chmod 755 /tmp/w; /tmp/w; echo $?; rm /tmp/w",
    "missing interpreter": "printf '#!/no/such\\n' > /tmp/i; chmod 755 /tmp/i; /tmp/i; echo $?; rm /tmp/i",
    "script without a first line": "echo 'echo ran $0' > /tmp/n; chmod 755 /tmp/n; /tmp/n; rm /tmp/n",
    "exit code": "exit 77",
    "death by a signal": "sh -c 'kill -9 $$'; echo $?; sh -c 'kill -TERM $$'; echo $?",
    "syntax error": "if true; then",
    "unset variable": "(set -u; echo $no_such_variable); echo $?",
    "trap": "sh -c 'trap \"echo caught\" USR1 EXIT; kill -USR1 $$; echo on'",
    "pipes": "seq 5 | sort -r | head -n 2 | tr '\\n' ,; (exit 3) | true; echo $?",
    "broken pipe": "yes | head -n 1; (sleep 0.1; echo late; echo $? >&2) | true",
    "here-document": "cat <<END\n$((6 * 7)) $(echo sub)\nEND",
    "both outputs": "echo out; echo err >&2; cat /no/such 2>&1",
    "no directory": "mkdir /tmp/gone; (cd /tmp/gone; rmdir /tmp/gone; pwd; ls; cd ..; pwd)",
    "input": "cat; read x; echo $?; readlink /proc/self/fd/0",
    "descriptors": "ls /proc/self/fd",
    "big output": "seq 20000 | cksum; seq 3000 | tail -n 1",
    "binary output": "printf 'a\\0b\\001\\n' | od -c",
    "expansions": "echo /e*/pass*; echo {a,b}; echo $((1 << 40)) ${PATH#*:} ${#PATH}",
    "which shell": "readlink -f /bin/sh; echo ${BASH_VERSION:+bash}",
    # The machine.
    "limits": "ulimit -a | grep -v -e locked -e pending -e 'process' | sort",
    "processes limit": "ulimit -u",
    "raise a limit": "(ulimit -n 100; ulimit -n; ulimit -c 0; ulimit -c)",
    "hostname": "hostname; cat /proc/sys/kernel/hostname; uname -n",
    "set hostname": "hostname other; echo $?",
    "cpus": "nproc; grep -c ^processor /proc/cpuinfo",
    "kernel": "uname -srm",
    "devices": "ls /dev; stat -c '%n %a %t:%T' /dev/null /dev/zero /dev/full /dev/urandom /dev/tty /dev/ptmx",
    "device links": "for name in fd stdin stdout stderr core ptmx; do readlink /dev/$name; done",
    "device use": "head -c 3 /dev/zero | od -c; echo x > /dev/null; echo x > /dev/full; head -c 4 /dev/urandom | wc -c",
    "mounts": "awk '{print $5}' /proc/self/mountinfo | sort",
    "mount options": "awk '$5 ~ /^.(proc|sys|dev)$/ {print $5, $6}' /proc/self/mountinfo | sort",
    "mount": "mkdir /tmp/m; mount -t tmpfs none /tmp/m; echo $?; rmdir /tmp/m",
    "proc": "cat /proc/sys/kernel/ostype; echo 1 > /proc/sys/kernel/printk; ls -d /proc/kcore /proc/keys /proc/1/root",
    "sysctl": "cat /proc/sys/vm/overcommit_memory /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/vm/drop_caches",
    "sys": "ls /sys; cat /sys/class/net/lo/mtu; ls /sys/class/net; echo x > /sys/kernel/x",
    "own process": "grep -E '^(Name|State|Threads)' /proc/self/status; cat /proc/self/oom_score_adj",
    "first process": "cat /proc/1/comm; ls -d /proc/[0-9]* | head -n 1; ls /proc/1/cwd",
    "ps": "ps -o comm | sort -u | grep -v -e ps -e sort -e grep; ps >/dev/null; echo $?",
    "sleep and kill": "{ sleep 100 & kill $!; wait $!; } 2>/dev/null; echo $?; kill -0 999999; echo $?",
    "jobs": "(sleep 0.2; echo late) & echo first; wait; echo last",
    "nice": "nice; nice -n 5 nice; nice -n -5 nice",
    "unshare": "unshare -r id -u; unshare -m true; echo $?; unshare -U true; echo $?",
    "chroot": "chroot / /bin/sh -c 'echo inside; pwd'",
    "dmesg": "dmesg | head -n 1 | wc -l; echo $?",
    "terminal": "tty; stty size; test -t 0; echo $?; test -t 1; echo $?; : < /dev/tty",
    "locale": "locale 2>/dev/null | head -n 2; echo ${LANG-none} ${LC_ALL-none}; printf 'é' | wc -m",
    "time zone": "date -u -d @0 +%F; date -d @1000000000 +%H:%M%Z; TZ=Asia/Tokyo date -d @0 +%H:%M; echo ${TZ-none}",
    "name lookup": "getent hosts localhost; getent passwd root; getent group 0",
    "network": "cut -d: -f1 /proc/net/dev | tail -n 1; wc -l < /proc/net/route; ping -c 1 127.0.0.1 | grep -c loss",
    "C library": "for program in facts /facts; do $program 2>/dev/null; done; echo $?",
    "loader": "ls /lib/ld-musl-* /lib64/ld-linux-*; head -c 4 /bin/sh | tail -c 3",
    "find": "find /etc -maxdepth 1 -type d | sort | head; find / -xdev -perm -4000 2>/dev/null | sort",
    "tar": "(cd /tmp && mkdir t && echo x > t/y && tar -cf - t | tar -tf -; rm -r /tmp/t)",
    "packages": "dpkg -s base-files | head -n 2; rpm -qa; apk --version; dpkg --print-architecture",
    "package change": "rpm -qf /etc/redhat-release; rpm -e redhat-release; echo $?; ls /etc/redhat-release",
    "apt": "apt-get install no-such-package; echo $?",
    "login shell": "sh -lc 'echo $PROFILE_D $PAGER; umask'",
    "sticky": "mkdir /tmp/st; chmod 1777 /tmp/st; touch /tmp/st/x; ls -ld /tmp/st | cut -c1-10; rm -r /tmp/st",
    "attributes": "touch /tmp/at; chattr +i /tmp/at; rm -f /tmp/at; ls /tmp/at; chattr -i /tmp/at; rm -f /tmp/at",
    "timeout": "timeout 0.2 sleep 5; echo $?",
    "large file": "truncate -s 1G /tmp/big && stat -c %s /tmp/big; rm -f /tmp/big",
    "swap and memory": "grep -c MemTotal /proc/meminfo; free >/dev/null; echo $?",
    "at last": "ls -A /tmp /dev/shm; ls -A ~",
}
"""Commands by name. All of a kind run in one container, in this order."""


@dataclass(frozen=True)
class Reason:
    """Why answers differ: for commands, by name, in some kinds of images and ways of running them."""

    text: str
    commands: tuple[str, ...]
    kinds: tuple[str, ...] = tuple(KINDS)
    ways: tuple[str, ...] = (EXEC, SESSION)


REASONS = (
    Reason(
        "Shared memory is part of a state: /dev/shm leads to the directory /run/shm, so /run exists.",
        ("modes", "root", "no directory"),
    ),
    Reason("The same: `ls` of the root, which is the home, shows /run.", ("at last",), ("tiny",)),
    Reason("No process may make device nodes (CAP_MKNOD): a state has files only.", ("mknod", "block device")),
    Reason("Hosts: the host name is a name of the loopback; no names of IPv6 multicast.", ("hosts",)),
    Reason(
        "A sandbox's host name resolves to its loopback; a container without a network has none.",
        ("sudo",),
        ("debian",),
    ),
    Reason("No set-uid program gains rights (no_new_privs).", ("sudo",), ("ubuntu",)),
    Reason("The home directory lacks what sudo writes there, because sudo is refused.", ("at last",), ("ubuntu",)),
    Reason("A sandbox has no network and no name server; Docker copies the machine's file.", ("resolver",)),
    Reason("Fewer capabilities (no NET_RAW, MKNOD, AUDIT_WRITE), and no_new_privs.", ("privileges", "network")),
    Reason(
        "Sessions export USER, TERM, LANG and what avoids noise; HOSTNAME is not exported.", ("env",), ways=(SESSION,)
    ),
    Reason("Sessions have LANG=C.UTF-8.", ("locale", "C library"), ways=(SESSION,)),
    Reason("Sessions have LANG=C.UTF-8, so quotes are others.", ("denied",), ("debian",), (SESSION,)),
    Reason("Commands of a session are evaluated by a live bash.", ("syntax error",), ways=(SESSION,)),
    Reason("The spec limits files to disk_mb; 1,024 open files, whatever the daemon's limit is.", ("limits",)),
    Reason("The user of the container may signal its own pid 1; here that is root's.", ("denied",), ("ubuntu",)),
    Reason(
        "/dev is read-only; more of /proc and /sys is masked; /etc/hosts and others are no mounts.",
        ("mounts", "mount options"),
    ),
    Reason("Pid 1 is Forkpoint's, runs as root and shows nothing of itself.", ("proc", "first process", "ps")),
)


class Pair:
    """A sandbox and a container of one kind."""

    def __init__(self, proxy: Proxy, theirs: docker.DockerClient, name: str, kind: ImageKind) -> None:
        self._http = httpx.Client(base_url=proxy.url, timeout=120, trust_env=False)
        self._task = f"images-{name}"
        self._http.put(
            f"/api/v1/tasks/{self._task}", json={"image": image_name(name), "hostname": "images"}
        ).raise_for_status()
        url = f"tcp://127.0.0.1:{proxy.port}/t/{self._task}/r/exec/docker"
        self._ours = docker.DockerClient(base_url=url, timeout=120)
        options: dict[str, Any] = {"detach": True, "network_mode": "none", "hostname": "images"}
        self._inside = self._ours.containers.run(image_name(name), ["sleep", "infinity"], **options)
        self._container = theirs.containers.run(image_name(name), list(kind.sleeper), **options)
        # A session has bash in each image. Beside it runs the image's own, or else a static one that is put there.
        given = {} if kind.bash else {STATIC_BASH: {"bind": BASH_INSIDE, "mode": "ro"}}
        self._beside = theirs.containers.run(image_name(name), list(kind.sleeper), volumes=given, **options)
        self._bash = "bash" if kind.bash else BASH_INSIDE

    def answers(self, way: str, command: str) -> tuple[Answer, Answer]:
        """Return ours and Docker's."""
        if way == EXEC:
            return _exec(self._inside, ["sh", "-c", command]), _exec(self._container, ["sh", "-c", command])
        response = self._http.post(f"/t/{self._task}/r/session/shell/exec", json={"command": command})
        body = response.raise_for_status().json()
        ours = body["stdout"], body["stderr"], body["exit_code"]
        return ours, _exec(self._beside, [self._bash, "-c", command, "bash"])

    def close(self) -> None:
        for container in (self._container, self._beside):
            container.remove(force=True)
        self._ours.close()
        self._http.close()


def _exec(container: Any, argv: list[str]) -> Answer:
    answer = container.exec_run(argv, demux=True)
    out, err = ((part or b"").decode(errors="replace") for part in answer.output)
    return out, err, answer.exit_code


def comparable(answer: Answer) -> Answer:
    """Return an answer without what differs from run to run: pids in errors, and the order of a pipe's errors."""
    out, err, code = answer
    return out, "".join(sorted(re.sub(r"(line \d+: +)\d+ ", r"\1PID ", err).splitlines(keepends=True))), code


def image_name(kind: str) -> str:
    return f"forkpoint-bench-{kind}:1"


def make_image(daemon: Dockerd, name: str, kind: ImageKind) -> None:
    """Make the image of a kind in the daemon."""
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-bench-root-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        kind.make(folder)
        config = kind.config
        changes = [f"ENV {variable}" for variable in config.get("Env", ())]
        changes += [
            f"{word.upper()} {config[key]}"
            for word, key in (("user", "User"), ("workdir", "WorkingDir"))
            if key in config
        ]
        options = [option for change in changes for option in ("--change", change)]
        with subprocess.Popen(["tar", "-c", "-C", folder, "."], stdout=subprocess.PIPE) as files:
            command = ["docker", "--host", daemon.host, "import", *options, "-", image_name(name)]
            subprocess.run(command, stdin=files.stdout, check=True, stdout=subprocess.DEVNULL)
    finally:
        remove_tree(folder)


def reason(command: str, kind: str, way: str) -> str:
    """Return why the answers of a command may differ; empty if they must be equal."""
    for each in REASONS:
        if command in each.commands and kind in each.kinds and way in each.ways:
            return each.text
    return ""


def measured(kinds: list[str], commands: list[str]) -> dict[tuple[str, str, str], tuple[Answer, Answer]]:
    """Return ours and Docker's answers, by command, kind and way."""
    answers: dict[tuple[str, str, str], tuple[Answer, Answer]] = {}
    with dockerd() as daemon, data_directory() as folder:
        os.environ["DOCKER_HOST"] = daemon.host
        for name in kinds:
            make_image(daemon, name, KINDS[name])
        with served(folder) as proxy, closing(docker.DockerClient(daemon.host, timeout=120)) as theirs:
            for name in kinds:
                with closing(Pair(proxy, theirs, name, KINDS[name])) as pair:
                    for command, way in product(commands, (EXEC, SESSION)):
                        answers[command, name, way] = pair.answers(way, COMMANDS[command])
    return answers


def main() -> None:
    """Run all commands and print the table."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of images, by comma")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="names of commands, by comma")
    parser.add_argument("--show", action="store_true", help="show both answers of each difference")
    given = parser.parse_args()
    kinds, commands = given.kinds.split(","), given.commands.split(",")
    shown = Table(title=f"{len(commands)} commands in {len(kinds)} kinds of images\n{machine()}")
    for column in ("command", "equal", "differs in", "reason"):
        shown.add_column(column)
    differing: dict[str, dict[str, list[str]]] = {command: {} for command in commands}
    for (command, kind, way), pair in measured(kinds, commands).items():
        if comparable(pair[0]) != comparable(pair[1]):
            differing[command].setdefault(reason(command, kind, way), []).append(f"{kind}/{way}")
            if given.show:
                console.print(command, kind, way, *map(repr, pair), sep="\n  ", markup=False, soft_wrap=True)
    for command, where in differing.items():
        count = 2 * len(kinds)
        equal = f"{count - sum(map(len, where.values()))} of {count}"
        for why, places in where.items() or {"": []}.items():
            shown.add_row(command, equal, " ".join(places), why or ("NOT LISTED" if places else ""))
    console.print(shown)
    if unlisted := sum(len(where.get("", ())) for where in differing.values()):
        sys.exit(f"{unlisted} answers differ without a reason.")


if __name__ == "__main__":
    main()
