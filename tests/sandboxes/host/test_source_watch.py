"""A directory that a spec names is walked once; afterwards the kernel says whether it has changed."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.host import source_watch
from sandboxes.host.source_digest import SourceDigests
from sandboxes.host.source_walk import MODIFY, directory_digest
from sandboxes.host.source_watch import SourceWatch
from sandboxes.sources import SourceRules

RULES = SourceRules()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    root = tmp_path / "base"
    for name in ("a/b", "c"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("text\n")
    (root / "link").symlink_to("/etc")
    return root


def digest(digests: SourceDigests, source: Path) -> str:
    return digests.of_source(str(source), RULES, confined=False)


def test_an_unchanged_directory_is_not_walked_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = SourceDigests()
    first = digest(digests, base)
    monkeypatch.setattr(source_watch, "_walk", lambda *_: pytest.fail("it was walked again"))
    assert digest(digests, base) == first == digests.known(str(base))


def replace_base(base: Path) -> None:
    base.rename(base.with_name("old"))
    (base / "a/b").mkdir(parents=True)


def relink(base: Path) -> None:
    (base / "link").unlink()
    (base / "link").symlink_to("/usr")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a new file": lambda base: (base / "a/b/new").touch(),
    "new content": lambda base: (base / "c/file").write_text("other"),
    "longer": lambda base: os.truncate(base / "c/file", 9),
    "mode": lambda base: (base / "c/file").chmod(0o700),
    "removed": lambda base: (base / "a/b/file").unlink(),
    "renamed": lambda base: (base / "a/b").rename(base / "a/d"),
    "a new directory": lambda base: (base / "a/b/new").mkdir(),
    "a link": relink,
    "times": lambda base: os.utime(base / "c/file", (1, 1)),
    "another directory": replace_base,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("watched", [True, False])
def test_each_change_is_noticed(base: Path, change: str, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a watch: where the user's inotify limits are used up, a walk counts for a second only."""
    if not watched:
        monkeypatch.setattr(source_watch, "_MAX_WATCHED", 0)
        monkeypatch.setattr(source_watch, "_UNWATCHED_S", 0.0)
        monkeypatch.setattr(source_watch, "_UNWATCHED_TIMES", 0.0)
    digests = SourceDigests()
    first = digest(digests, base)
    CHANGES[change](base)
    assert digests.known(str(base)) is None
    assert digest(digests, base) != first
    assert digest(digests, base) == directory_digest(str(base))


def test_a_change_after_the_second_walk_is_noticed(base: Path) -> None:
    """Each walk arms a new watch: the first change does not make the second one invisible."""
    digests = SourceDigests()
    seen = [digest(digests, base)]
    for number in range(3):
        (base / f"a/new-{number}").touch()
        seen.append(digest(digests, base))
    assert len(set(seen)) == 4


def test_a_link_that_leads_elsewhere_is_noticed(base: Path, tmp_path: Path) -> None:
    """A deployment switches a link from one directory to the next."""
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / "current"
    link.symlink_to(base)
    digests = SourceDigests()
    first = digest(digests, link)
    link.unlink()
    link.symlink_to(other)
    assert digests.known(str(link)) is None
    assert digest(digests, link) != first


def test_a_file_with_kept_size_and_time_is_noticed(tmp_path: Path) -> None:
    """Tools that copy may set the old time on new content; the inode's own time cannot be set."""
    archive = tmp_path / "a.tar"
    archive.write_bytes(b"one")
    status, digests = archive.stat(), SourceDigests()
    first = digest(digests, archive)
    assert digests.known(str(archive)) == first
    archive.write_bytes(b"two")
    os.utime(archive, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digests.known(str(archive)) is None
    assert digest(digests, archive) != first


def test_missing_directories_are_unknown(base: Path) -> None:
    digests = SourceDigests()
    digest(digests, base)
    base.rename(base.with_name("gone"))
    assert digests.known(str(base)) is None
    assert digests.known("/nowhere") is None


def test_a_lost_watch_says_that_something_may_have_changed(base: Path) -> None:
    """Events that the kernel dropped, or a watch that could not be had, must not look like silence."""
    without, full = SourceWatch(wanted=False), SourceWatch()
    full.add(str(base), 0x100)
    assert [without.is_quiet, full.is_quiet] == [False, True]
    (base / "new").touch()
    # A change stays a change.
    assert [full.is_quiet, full.is_quiet] == [False, False]


def test_a_watch_is_not_closed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread ends the watch while the event loop reads it. The descriptor's number could be another file's then."""
    watch, order, closed = SourceWatch(), list[str](), threading.Event()
    watch.add(str(tmp_path), MODIFY)
    read, close = os.read, os.close
    closing = threading.Thread(target=watch.close)

    def read_slowly(fd: int, count: int) -> bytes:
        closing.start()
        # Without a lock, the thread closes it now.
        closed.wait(0.2)
        order.append("read")
        return read(fd, count)

    def note(fd: int) -> None:
        close(fd)
        order.append("closed")
        closed.set()

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read_slowly)
        patched.setattr(os, "close", note)
        assert watch.is_quiet
        closing.join()
    assert order == ["read", "closed"]
