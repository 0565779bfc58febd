"""Images for tests, made without a registry and without a daemon: archives of this machine's own programs."""

import atexit
import functools
import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMANDS = [
    "cat",
    "chmod",
    "chown",
    "chroot",
    "cp",
    "cut",
    "date",
    "dd",
    "df",
    "dmesg",
    "env",
    "find",
    "grep",
    "head",
    "hostname",
    "id",
    "insmod",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mknod",
    "mount",
    "mv",
    "ps",
    "python3",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "setpriv",
    "setsid",
    "sleep",
    "sort",
    "stat",
    "stty",
    "sync",
    "tail",
    "tee",
    "test",
    "touch",
    "tr",
    "true",
    "umount",
    "unshare",
    "wc",
]
AGENT_COMMANDS = (
    "awk", "basename", "diff", "du", "expr", "getfacl", "getfattr", "git", "ipcmk", "ipcs", "lsattr", "make",
    "md5sum", "mktemp", "nohup", "pgrep", "pkill", "prlimit", "pwd", "realpath", "renice", "setfacl", "setfattr", "tar",
    "taskset", "timeout", "truncate", "uniq", "xargs",
)  # fmt: skip
"""What else agents use. Programs that this machine lacks are left out."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PATHS = ("usr/bin", "usr/sbin", "bin", "sbin")


def bash_image() -> str:
    """Return the path of an archive: bash and Python."""
    return _archive("bash", COMMANDS)


def sh_image() -> str:
    """Return the path of an archive: dash, and neither bash nor Python."""
    return _archive("dash", [name for name in COMMANDS if name != "python3"])


def busybox_image() -> str:
    """Return the path of an archive that has busybox alone."""
    return _archive("", [])


def agent_image() -> str:
    """Return the path of an archive that also has git, make and what else agents use."""
    return _archive("bash", [*COMMANDS, *AGENT_COMMANDS])


def configured(image: str, config: Mapping[str, Any], more: Mapping[str, bytes] | None = None) -> str:
    """Return the path of an archive like another one, with a configuration, and with more files in a further layer."""
    target = _FOLDER() / f"{hashlib.sha256(repr((image, config, more)).encode()).hexdigest()[:16]}.tar"
    if not target.exists():
        with tarfile.open(image) as archive:
            layer = archive.extractfile("layer0.tar")
            assert layer is not None
            layers = [layer.read(), *([_files(more)] if more else [])]
        target.write_bytes(saved(layers, config))
    return str(target)


def saved(layers: Sequence[bytes], config: Mapping[str, Any]) -> bytes:
    """Return an archive as `docker save` writes it."""
    machines = {"x86_64": "amd64", "aarch64": "arm64"}
    described = {
        "architecture": machines[platform.machine()], "os": "linux", "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
    }  # fmt: skip
    names = [f"layer{number}.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": ["test:1"], "Layers": names}]
    contents = {"manifest.json": json.dumps(manifest).encode(), "config.json": json.dumps(described).encode()}
    return _files(contents | dict(zip(names, layers, strict=True)))


def write_archive(name: str, content: bytes) -> str:
    """Return the path of a new file, which the end of the tests removes."""
    target = _FOLDER() / name
    target.write_bytes(content)
    return str(target)


@functools.cache
def _FOLDER() -> Path:  # noqa: N802 - a constant that is made when it is first needed
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-test-images-", dir="/var/tmp"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _archive(shell: str, commands: Sequence[str]) -> str:
    return _made(shell, tuple(commands))


@functools.cache
def _made(shell: str, commands: tuple[str, ...]) -> str:
    content = saved([root_tar(shell, commands)], {"Env": [f"PATH={PATH}"], "Cmd": ["/bin/sh"]})
    return write_archive(f"{shell or 'busybox'}-{len(commands)}.tar", content)


def root_tar(shell: str, commands: Sequence[str]) -> bytes:
    """Return a tar of this machine's own programs and the libraries they need; with no shell, of busybox. 1 s."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        _folders(tar)
        if shell:
            _programs(tar, shell, commands)
        else:
            _busybox(tar)
    return archive.getvalue()


def _files(contents: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def _folders(tar: tarfile.TarFile) -> None:
    for folder in ("usr", "usr/bin", "etc", "root", "tmp", "run", "var", "home", "opt", "mnt"):
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
        tar.addfile(entry)
    _link(tar, "bin", "usr/bin")
    _text(tar, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1::/usr/sbin:/bin/sh\n")
    _text(tar, "etc/group", "root:x:0:\n")


def _programs(tar: tarfile.TarFile, shell: str, commands: Sequence[str]) -> None:
    files: set[str] = set()
    for name in (shell, *commands):
        result = shutil.which(name, path=":".join(f"/{path}" for path in _PATHS))
        if result is None:
            continue
        real = str(Path(result).resolve())
        tar.add(real, f"usr/bin/{name}")
        files |= _libraries(real)
        if name == "python3":
            files |= _python(real)
    if shell == "bash":
        _link(tar, "usr/bin/sh", "bash")
    else:
        _link(tar, "usr/bin/sh", shell)
    for file in sorted(files):
        tar.add(str(Path(file).resolve()), file.lstrip("/"))


def _libraries(program: str) -> set[str]:
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", output))


def _python(real: str) -> set[str]:
    program = "import sys, ctypes, socket, json, sqlite3, py_compile, random, base64, hashlib, socketserver, typing, array, fcntl, mmap, resource, select, signal, struct, termios, tty; print('\\n'.join(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"  # noqa: E501
    output = subprocess.run([real, "-I", "-S", "-c", program], capture_output=True, text=True, check=True).stdout
    folder = Path(output.splitlines()[0]).parent
    modules = {line for line in output.splitlines() if line.startswith("/")}
    modules |= {str(path) for path in (folder / "encodings").glob("*.py")}
    natives = {library for module in modules if module.endswith(".so") for library in _libraries(module)}
    return modules | natives


def _busybox(tar: tarfile.TarFile) -> None:
    tar.add(str(Path(shutil.which("busybox") or "").resolve()), "usr/bin/busybox")
    output = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout
    for name in output.split():
        if name != "busybox":
            _link(tar, f"usr/bin/{name}", "busybox")


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))
