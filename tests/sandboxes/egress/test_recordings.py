"""Recordings on disk."""

import os
from pathlib import Path

from sandboxes.egress.recordings import Recordings


def record(recordings: Recordings, key: str, body: bytes) -> None:
    draft = recordings.draft()
    draft.write(body)
    recordings.keep(key, draft, 200, (("etag", "é"),))
    draft.close()


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    record(Recordings(tmp_path), "a", b"body")
    response = Recordings(tmp_path).load("a")
    assert response is not None
    with response.body:
        assert (response.status, response.headers, response.length) == (200, (("etag", "é"),), 4)
        assert response.body.read(4) == b"body"


def test_any_damage_counts_as_no_recording(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    record(recordings, "whole", b"body")
    content = (tmp_path / "whole").read_bytes()
    for at in range(len(content)):
        (tmp_path / "a").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert recordings.load("a") is None
        (tmp_path / "a").write_bytes(content[:at])
        assert recordings.load("a") is None
    assert not (tmp_path / "a").exists()


def test_the_least_recently_used_ones_go_first(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path, max_bytes=40_000)
    for number, key in enumerate("abc"):
        record(recordings, key, bytes(10_000))
        os.utime(tmp_path / key, (number, number))
    response = recordings.load("a")
    assert response is not None
    response.body.close()
    record(recordings, "d", bytes(10_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]


def test_an_environment_that_fills_the_room_loses_its_own(tmp_path: Path) -> None:
    """Other environments keep theirs, although they used them longer ago: their replays need them."""
    recordings = Recordings(tmp_path, max_bytes=40_000)
    record(recordings, "ours-a", bytes(5_000))
    os.utime(tmp_path / "ours-a", (0, 0))
    for number in range(20):
        record(recordings, f"theirs-{number}", bytes(5_000))
    assert (tmp_path / "ours-a").exists()


def test_recordings_of_older_versions_are_found(tmp_path: Path) -> None:
    """Their files had no scope in their names."""
    record(Recordings(tmp_path), "digest", b"body")
    response = Recordings(tmp_path).load("scope-digest")
    assert response is not None
    response.body.close()
    assert [path.name for path in tmp_path.iterdir()] == ["scope-digest"]


def test_recordings_that_were_added_beside_count(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path, max_bytes=40_000)
    for number in range(5):
        (tmp_path / str(number)).write_bytes(bytes(10_000))
        os.utime(tmp_path / str(number), (number, number))
    recordings.recount()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]


def test_drafts_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    Recordings(tmp_path).draft().close()
    Recordings(tmp_path)
    assert list(tmp_path.iterdir()) == []
