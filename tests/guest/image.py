"""Builds the guest's disk from packages, in a chroot on this machine, and keeps it by its content.

1. `debian` is Debian 12 with systemd and its kernel.
2. `base` adds the locked Python packages, and CRIU as `docker/install-criu.sh` installs it.
3. `disk` is the base with this checkout, installed in the two ways that the documentation has: with `./run` in
   `/srv/forkpoint`, and as a wheel in `/opt/forkpoint`. It depends on every file of the checkout.

Every mount is made in a mount namespace of its own, so that none is left when a build fails.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
PACKAGES = (
    "systemd", "systemd-sysv", "udev", "kmod", "dbus", "initramfs-tools", "zstd", "linux-image-cloud-amd64",
    "python3", "python3-venv", "gcc", "libc6-dev", "libpython3.11",
    "ca-certificates", "curl", "procps", "iproute2", "git", "acl", "attr", "e2fsprogs", "nftables", "strace",
)  # fmt: skip
TEST_PACKAGES = (
    "pytest", "pytest-xdist", "execnet", "iniconfig", "packaging", "pluggy", "hypothesis", "sortedcontainers",
    "psycopg", "psycopg-binary",
)  # fmt: skip
"""The packages of the development lock that the tests need which run in the guest."""
CHECKOUT, INSTALLED = "/srv/forkpoint", "/opt/forkpoint"
"""Where the guest has the checkout, with its environment in `.venv`, and the environment with the wheel."""
_DISK_BYTES = 8 << 30
"""Size of the disk, a sparse file. Two gigabytes are in use."""

_AGENT_UNIT = f"""
[Unit]
Description=Runs the commands of the tests
[Service]
ExecStart=/usr/bin/python3 {CHECKOUT}/tests/guest/agent.py
# What a command leaves running is ended by the command's own check.
KillMode=process
TasksMax=infinity
[Install]
WantedBy=multi-user.target
"""
_MODULES = r"virtio_pci\nvirtio_blk\next4\n"
"""What the guest's kernel needs to mount its root. Other modules would only make the start slower."""
_IN_CHROOT = """
inside() {
    chroot . env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
}
"""
"""Nothing of this machine's environment holds in the chroot."""
_DEBIAN = """
debootstrap --variant=minbase --include=$PACKAGES $SUITE . $MIRROR
printf "$MODULES" > etc/initramfs-tools/modules
sed -i 's/^MODULES=.*/MODULES=list/; s/^COMPRESS=.*/COMPRESS=zstd/' etc/initramfs-tools/initramfs.conf
mount -t proc proc proc
mount --bind /dev dev
inside update-initramfs -u
for timer in apt-daily apt-daily-upgrade dpkg-db-backup e2scrub_all fstrim; do
    inside systemctl mask --quiet $timer.timer
done
echo forkpoint-guest > etc/hostname
echo '127.0.0.1 localhost forkpoint-guest' > etc/hosts
"""
_BASE = """
cp -a $DEBIAN/. .
cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" etc/pip-certificates.crt
printf '[global]\\ncert = /etc/pip-certificates.crt\\n' > etc/pip.conf
cp /etc/resolv.conf etc/resolv.conf
mount -t proc proc proc
mount --bind /dev dev
inside python3 -m venv $CHECKOUT/.venv
inside $CHECKOUT/.venv/bin/pip install -q --no-compile --require-hashes -r /run.txt -r /test.txt
inside python3 -m venv $INSTALLED
inside $INSTALLED/bin/pip install -q --no-compile --require-hashes -r /run.txt
# Its own look at the kernel is about this machine's.
inside sh /install-criu.sh || test -x usr/local/sbin/criu
"""
_DISK = """
mkdir -p upper work root
mount -t overlay overlay -o lowerdir=$BASE,upperdir=$PWD/upper,workdir=$PWD/work root
cd root
mount -t proc proc proc
mount --bind /dev dev
tar -x -C .$CHECKOUT -f ../checkout.tar
cp ../agent.service etc/systemd/system/agent.service
inside systemctl enable --quiet agent.service
inside sh -c "cd $CHECKOUT && ./run --version && .venv/bin/python -m hatchling build --target wheel -d /root"
inside $INSTALLED/bin/pip install -q --no-deps --no-index --find-links /root forkpoint
inside python3 -m compileall -q $CHECKOUT $INSTALLED || true
umount proc dev
cp -L vmlinuz initrd.img ..
truncate -s $SIZE ../disk.img
mkfs.ext4 -q -F -L forkpoint-guest -d . ../disk.img
"""
_CHOICES = {"PACKAGES": ",".join(PACKAGES), "SUITE": SUITE, "MIRROR": MIRROR, "MODULES": _MODULES}


class MissingToolError(Exception):
    """A program is missing, without which no guest can be built or booted."""


@dataclass(frozen=True)
class Image:
    """The files of a guest: its kernel, the initial file system of that, and the disk."""

    kernel: Path
    initrd: Path
    disk: Path


def require_tools() -> None:
    """Raise an error that says which program or right is missing, if one is."""
    for tool, package in (
        ("debootstrap", "debootstrap"),
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("mkfs.ext4", "e2fsprogs"),
    ):
        if shutil.which(tool) is None:
            raise MissingToolError(f"{tool} is not installed (Debian: apt-get install {package})")
    if os.geteuid() != 0:
        raise MissingToolError("building the guest needs root, for debootstrap and chroot")


def built() -> Image:
    """Return the guest of this checkout. What is kept is used; building all takes some four minutes."""
    require_tools()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "forkpoint-guest")
    cache.mkdir(parents=True, exist_ok=True)
    checkout = _files()
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        debian = _kept(
            cache, "debian", [_DEBIAN, repr(_CHOICES)], lambda folder: _run_mounting(_DEBIAN, folder, **_CHOICES)
        )
        given = {
            "run.txt": _text("requirements.txt"),
            "test.txt": _locked(TEST_PACKAGES),
            "install-criu.sh": _text("docker/install-criu.sh"),
        }
        base = _kept(
            cache, "base", [debian.name, _BASE, *given.values()], lambda folder: _make_base(folder, debian, given)
        )
        files = [f"{name} {(ROOT / name).stat().st_mode:o} {_digest((ROOT / name).read_bytes())}" for name in checkout]
        disk = _kept(cache, "disk", [base.name, _DISK, *files], lambda folder: _make_disk(folder, base, checkout))
    return Image(disk / "vmlinuz", disk / "initrd.img", disk / "disk.img")


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    return sorted(name for name in listed if (ROOT / name).is_file())


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _kept(cache: Path, name: str, contents: list[str], make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` filled for these contents. The one for earlier contents is removed."""
    folder = cache / f"{name}-{_digest(repr(contents).encode())[:16]}"
    if folder.is_dir():
        return folder
    print(f"Building the guest's {name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    for earlier in cache.glob(f"{name}-*"):
        shutil.rmtree(earlier)
    part = cache / f"{name}-part"
    part.mkdir()
    make(part)
    part.rename(folder)
    print(f"Built the guest's {name} in {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)
    return folder


def _make_base(folder: Path, debian: Path, given: dict[str, str]) -> None:
    for name, text in given.items():
        (folder / name).write_text(text)
    _run_mounting(_BASE, folder, DEBIAN=str(debian))


def _make_disk(folder: Path, base: Path, checkout: list[str]) -> None:
    (folder / "agent.service").write_text(_AGENT_UNIT)
    listed = "\0".join(checkout).encode()
    command = [
        "tar",
        "-c",
        "-C",
        str(ROOT),
        "--null",
        "-T",
        "-",
        "--owner=0",
        "--group=0",
        "-f",
        str(folder / "checkout.tar"),
    ]
    subprocess.run(command, input=listed, check=True)
    _run_mounting(_DISK, folder, BASE=str(base), SIZE=str(_DISK_BYTES))
    for name in ("upper", "work", "root"):
        shutil.rmtree(folder / name)
    (folder / "checkout.tar").unlink()


def _locked(names: tuple[str, ...]) -> str:
    """Return the lines of the development lock for some packages, with their digests."""
    blocks = re.split(r"\n(?=\S)", _text("requirements-dev.txt"))
    return "\n".join(block for block in blocks if block.partition("==")[0] in names) + "\n"


def _run_mounting(script: str, folder: Path, **variables: str) -> None:
    settings = {"CHECKOUT": CHECKOUT, "INSTALLED": INSTALLED} | variables
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    _run(["unshare", "--mount", "--propagation", "private", "bash", "-euc", lines + _IN_CHROOT + script], folder)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stdout + done.stderr)[-3000:]}")
