"""Roots of the kinds of images that agents get, made of Debian's packages: musl, RHEL-like, Ubuntu, Debian, busybox."""

import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandboxes.linux.files import remove_tree
from tests.sandboxes.image_archives import PATH, saved, write_archive

MUSL_BUSYBOX = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "forkpoint-clients/busybox-musl/busybox")
"""What `.ci/musl` builds."""
RHEL_COMMANDS = """
awk basename bash cat chgrp chmod chown cp cut date dd df dirname du echo env expr false find flock getent grep head
hostname id install kill ldconfig ln locale login logger ls mkdir mkfifo mknod mktemp mount mv nice nohup nproc od
printenv printf prlimit ps pwd readlink realpath rm rmdir rpm sed seq setpriv setsid sh sleep sort stat stty su sync
tail tar tee test timeout touch tr true truncate tty umount uname uniq unshare wc whoami xargs
"""
_FACTS_C = r"""
#include <errno.h>
#include <grp.h>
#include <locale.h>
#include <netdb.h>
#include <pthread.h>
#include <pwd.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static void *in_thread(void *text) { printf("thread: %s\n", (char *)text); return NULL; }

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc > 1 && !strcmp(argv[1], "wait")) return pause();
    struct passwd *user = getpwuid(getuid());
    printf("getpwuid: %s %s\n", user ? user->pw_name : "-", user ? user->pw_shell : "-");
    user = getpwnam("root");
    printf("getpwnam: %s", user ? user->pw_dir : "-");
    printf(" %s\n", getpwnam("no-such-user") ? "?" : "-");
    struct group *group = getgrgid(getgid());
    printf("getgrgid: %s\n", group ? group->gr_name : "-");
    for (const char **name = (const char *[]){"localhost", "no-such-host.invalid", NULL}; *name; name++) {
        struct addrinfo *list = NULL, hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
        printf("getaddrinfo %s: %d\n", *name, getaddrinfo(*name, "80", &hints, &list) != 0);
    }
    printf("setlocale: %s\n", setlocale(LC_ALL, "") ? "set" : "-");
    time_t then = 1000000000;
    printf("localtime: %s", asctime(localtime(&then)));
    pthread_t thread;
    pthread_create(&thread, NULL, in_thread, "one");
    pthread_join(thread, NULL);
    pid_t child = fork();
    if (!child) _exit(7);
    int status = 0;
    waitpid(child, &status, 0);
    printf("fork: %d\n", WEXITSTATUS(status));
    char *words[] = {"sh", "-c", "exit 8", NULL};
    printf("posix_spawnp: %d", posix_spawnp(&child, "sh", NULL, NULL, words, environ));
    waitpid(child, &status, 0);
    printf(" %d\n", WEXITSTATUS(status));
    printf("isatty: %d\n", isatty(0));
    return 0;
}
"""
"""A program that asks its C library for what differs between C libraries; with `wait` it sleeps."""
_RHEL_USERS = """\
root:x:0:0:root:/root:/bin/bash
bin:x:1:1:bin:/bin:/sbin/nologin
daemon:x:2:2:daemon:/sbin:/sbin/nologin
nobody:x:65534:65534:Kernel Overflow User:/:/sbin/nologin
app:x:1001:1001:An app:/home/app:/bin/bash
"""
_RPM_SPEC = """\
Name: redhat-release
Version: 9.4
Release: 1
Summary: The release files
License: GPLv2
BuildArch: noarch
%description
The release files.
%install
mkdir -p %{buildroot}/etc
echo 'Red Hat Enterprise Linux release 9.4 (Plow)' > %{buildroot}/etc/redhat-release
%files
/etc/redhat-release
"""


@dataclass(frozen=True)
class ImageKind:
    """A kind of image.

    Attributes:
        make: Writes its root into an empty directory; skips the test if this machine lacks what that takes.
        config: The image's configuration, as in OCI's image specification.
        sleeper: A command that only waits, for a container.
        bash: Whether it has bash.
    """

    make: Callable[[Path], None]
    config: Mapping[str, Any] = field(default_factory=dict)
    sleeper: tuple[str, ...] = ("sleep", "100000")
    bash: bool = False


def musl_image() -> str:
    """Return the path of an archive with an Alpine-like root, whose user is not root."""
    return _archive("alpine", User="guest", WorkingDir="/home/guest", Env=(f"PATH={PATH}", "KIND=musl"))


def rhel_image() -> str:
    """Return the path of an archive with a RHEL-like root, whose user is not root."""
    return _archive("rhel", User="app", WorkingDir="/home/app", Env=(f"PATH={PATH}", "KIND=rhel"))


@functools.cache
def _archive(name: str, **config: Any) -> str:
    return write_archive(f"{name}.tar", saved([packed(KINDS[name].make)], config))


def packed(make: Callable[[Path], None]) -> bytes:
    """Return a tar of the root that a function writes."""
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-test-root-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        make(folder)
        return subprocess.run(["tar", "-c", "-C", folder, "."], capture_output=True, check=True).stdout
    finally:
        remove_tree(folder)


def make_musl(root: Path) -> None:
    """Fill a directory as Alpine is: busybox and a program, linked against musl. No bash, no glibc, no Python."""
    if not MUSL_BUSYBOX.exists() or shutil.which("musl-gcc") is None:
        _skip("MUSL", f"musl-gcc (Debian: musl-tools) or {MUSL_BUSYBOX}, which .ci/musl builds, is missing")
    _folders(root, "bin", "sbin", "lib", "usr/bin", "usr/sbin", "usr/lib", "home/guest")
    loader = f"ld-musl-{platform.machine()}.so.1"
    shutil.copy(f"/lib/{loader}", root / "lib" / loader)
    (root / "lib" / f"libc.musl-{platform.machine()}.so.1").symlink_to(loader)
    shutil.copy(MUSL_BUSYBOX, root / "bin/busybox")
    for name in _run(MUSL_BUSYBOX, "--list-full").split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if not (root / name).exists():
            (root / name).symlink_to("/bin/busybox")
    (root / "bin/busybox").chmod(0o4755)
    _compile("musl-gcc", root / "usr/bin/facts")
    _texts(
        root,
        {
            "etc/alpine-release": "3.17.0\n",
            "etc/os-release": 'NAME="Alpine Linux"\nID=alpine\nVERSION_ID=3.17.0\n',
            "etc/passwd": "root:x:0:0:root:/root:/bin/ash\nbin:x:1:1:bin:/bin:/sbin/nologin\n"
            "guest:x:405:100:guest:/home/guest:/bin/ash\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n",
            "etc/group": "root:x:0:root\nbin:x:1:root,bin\nusers:x:100:games\nwheel:x:10:guest\nnobody:x:65534:\n",
            "etc/shadow": "root:*::0:::::\nguest:!::0:::::\n",
            "etc/profile": "export PAGER=less\numask 022\n",
            "etc/shells": "/bin/sh\n/bin/ash\n",
        },
    )
    os.chown(root / "home/guest", 405, 100)


def make_rhel(root: Path) -> None:
    """Fill a directory as RHEL is: merged /usr with lib64, bash, a database of RPM, and no dpkg."""
    if os.geteuid() != 0 or shutil.which("rpmbuild") is None:
        _skip("RPM", "rpmbuild is missing (Debian: rpm), or this is not root, as ldconfig needs")
    _folders(root, "usr/bin", "usr/sbin", "usr/lib", "usr/lib64/security", "home/app", "var/lib/rpm", "etc/rpm")
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    needed: set[str] = set()
    for name in RHEL_COMMANDS.split():
        if program := shutil.which(name, path=PATH):
            place = "usr/sbin" if "/sbin/" in program else "usr/bin"
            shutil.copy2(Path(program).resolve(), root / place / name)
            needed |= _libraries(program)
    for name in ("permit", "rootok", "unix"):
        [module] = Path("/usr/lib").glob(f"*/security/pam_{name}.so")
        target = root / str(module).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module, target)
        needed |= _libraries(str(module))
    for library in needed:
        shutil.copy(library, root / "usr/lib64")
    for name in ("bash", "su", "mount", "umount"):
        (root / "usr/bin" / name).chmod(0o755 if name == "bash" else 0o4755)
    shutil.copy(shutil.which("bash", path=PATH) or "", root / "usr/bin/sh")
    _compile("gcc", root / "usr/bin/facts")
    _texts(
        root,
        {
            "etc/os-release": 'NAME="Red Hat Enterprise Linux"\nID="rhel"\nID_LIKE="fedora"\nVERSION_ID="9.4"\n',
            "etc/passwd": _RHEL_USERS,
            "etc/group": "root:x:0:\nbin:x:1:\ndaemon:x:2:\nwheel:x:10:app\nnobody:x:65534:\napp:x:1001:\n",
            "etc/shadow": "root:*:19000:0:99999:7:::\napp:!!:19000:0:99999:7:::\n",
            "etc/bashrc": "# /etc/bashrc\nBASHRCSOURCED=Y\n[ $UID -gt 199 ] && umask 002 || umask 022\n",
            "etc/profile": "for script in /etc/profile.d/*.sh; do . $script; done\n",
            "etc/profile.d/lang.sh": "export PROFILE_D=read\n",
            "etc/skel/.bashrc": "[ -f /etc/bashrc ] && . /etc/bashrc\n",
            "root/.bashrc": "[ -f /etc/bashrc ] && . /etc/bashrc\n",
            "etc/ld.so.conf": "include ld.so.conf.d/*.conf\n/usr/lib64\n",
            "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
            "etc/pam.d/su": "auth sufficient pam_rootok.so\nauth required pam_unix.so\n"
            "account sufficient pam_rootok.so\naccount required pam_unix.so\nsession required pam_permit.so\n",
            "etc/rpm/macros": "%_dbpath /var/lib/rpm\n",
        },
    )
    shutil.copytree("/usr/lib/rpm", root / "usr/lib/rpm", symlinks=True)
    os.chown(root / "home/app", 1001, 1001)
    _run("ldconfig", "-r", root)
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "redhat-release.spec")
        spec.write_text(_RPM_SPEC)
        _run("rpmbuild", "-bb", "--quiet", "--define", f"_topdir {folder}", spec)
        package = f"{folder}/RPMS/noarch/redhat-release-9.4-1.noarch.rpm"
        _run("rpm", "--root", root, "--dbpath", "/var/lib/rpm", "--install", package)


def make_debian(root: Path) -> None:
    """Fill a directory with a minimal Debian 12. A minute."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        _skip("DEBIAN", "debootstrap is missing, or this is not root")
    command = ["debootstrap", "--variant=minbase", "--include=procps,sudo", "bookworm", str(root)]
    if (made := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        _skip("DEBIAN", f"debootstrap: {made.stdout.strip().splitlines()[-1]}")
    _compile("gcc", root / "usr/bin/facts")


def make_ubuntu(root: Path) -> None:
    """Fill a directory with a Debian that has what Ubuntu's images add: the user `ubuntu`, and sudo for it."""
    make_debian(root)
    _run("useradd", "--root", root, "--create-home", "--shell", "/bin/bash", "--groups", "sudo", "ubuntu")
    release = 'PRETTY_NAME="Ubuntu 22.04.4 LTS"\nNAME="Ubuntu"\nVERSION_ID="22.04"\nID=ubuntu\nID_LIKE=debian\n'
    _texts(
        root,
        {
            "usr/lib/os-release": release,
            "etc/lsb-release": "DISTRIB_ID=Ubuntu\nDISTRIB_RELEASE=22.04\n",
            "etc/sudoers.d/ubuntu": "ubuntu ALL=(ALL) NOPASSWD:ALL\n",
        },
    )


def make_busybox(root: Path) -> None:
    """Fill a directory as Docker's image of busybox is: one static program."""
    _folders(root, "bin", "home", "usr/bin", "usr/sbin")
    busybox = _static_busybox()
    shutil.copy(busybox, root / "bin/busybox")
    for name in _run(busybox, "--list").split():
        if name != "busybox":
            (root / "bin" / name).hardlink_to(root / "bin/busybox")
    _texts(root, {"etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "etc/group": "root:x:0:\nwheel:x:10:root\n"})


def make_tiny(root: Path) -> None:
    """Fill a directory with a shell and one static program, and nothing else: no /etc, no /tmp, no users."""
    (root / "bin").mkdir()
    shutil.copy(_static_busybox(), root / "bin/sh")
    _compile("gcc", root / "facts", "-static")


def _skip(what: str, reason: str) -> None:
    """Skip the test; in this project's CI, where the machine must have what is missing, fail it."""
    assert not os.environ.get(f"FORKPOINT_NEEDS_{what}"), reason
    pytest.skip(reason)


def _static_busybox() -> str:
    if (busybox := shutil.which("busybox")) is None or _libraries(busybox):
        pytest.skip("busybox is missing (Debian: busybox-static)")
    return busybox


def _libraries(program: str) -> set[str]:
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", output))


def _folders(root: Path, *more: str) -> None:
    for name in ("etc", "root", "tmp", "run", "var/tmp", "opt", "mnt", *more):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "root").chmod(0o700)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)


def _texts(root: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        if name == "etc/shadow":
            (root / name).chmod(0o640)


def _compile(compiler: str, target: Path, *options: str) -> None:
    command = [compiler, *options, "-w", "-O1", "-x", "c", "-", "-o", str(target), "-pthread"]
    subprocess.run(command, input=_FACTS_C, capture_output=True, text=True, check=True)


def _run(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


KINDS = {
    "debian": ImageKind(make_debian, {"Cmd": ["bash"], "Env": [f"PATH={PATH}"]}, bash=True),
    "ubuntu": ImageKind(
        make_ubuntu,
        {
            "Cmd": ["/bin/bash"], "Env": [f"PATH={PATH}", "LANG=C.UTF-8", "TZ=Etc/UTC"], "User": "ubuntu",
            "WorkingDir": "/home/ubuntu",
        },
        bash=True,
    ),
    "rhel": ImageKind(make_rhel, {"Cmd": ["/bin/bash"], "Env": [f"PATH={PATH}", "container=oci"]}, bash=True),
    "alpine": ImageKind(make_musl, {"Cmd": ["/bin/sh"], "Env": [f"PATH={PATH}"]}),
    "busybox": ImageKind(make_busybox, {"Cmd": ["sh"]}),
    "tiny": ImageKind(make_tiny, {"Cmd": ["/facts"]}, ("/facts", "wait")),
}  # fmt: skip
"""The kinds of images, by name."""
