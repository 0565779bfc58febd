"""Backups of several workers: their parts, and data directories for another number of workers."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from proxy.shares import Share
from proxy.storage.backup import STATES
from proxy.storage.data_dir import STORE, directory_of, write_workers
from proxy.transfer.format import BundleError, Part, read
from proxy.transfer.joining import join, keep_share
from proxy.transfer.state_records import unit_of
from sandboxes.linux.files import sync_path


def workers_in(bundle: BinaryIO) -> int:
    """Return how many workers made a backup, by its manifest; 1 if the manifest is damaged, which `read` reports."""
    try:
        return _workers(next(read(bundle)))
    except BundleError:
        return 1


def numbers_of_states(file: Path) -> tuple[int, int]:
    """Return a file's tree and how far its nodes' numbers moved, from `TREE.tar` or `TREE+DISTANCE.tar` (pure)."""
    tree, _, distance = file.stem.partition("+")
    return int(tree), int(distance or 0)


def unpacked_workers(file: Path, drafts: Path, advance: Callable[[int], None]) -> Iterator[Path]:
    """Yield a file with each worker's backup, removed before the next one. Raises BundleError or OSError."""
    part_file, number, workers = drafts / "part", -1, 0
    with file.open("rb") as reading:
        for part in read(reading):
            advance(len(part.stored))
            if part.kind == "chunk" and number >= 0:
                with part_file.open("ab") as output:
                    output.write(part.data)
                continue
            if part.kind == "manifest":
                workers = _workers(part)
                continue
            if number >= 0:
                yield part_file
                part_file.unlink()
            if part.kind != "seal":
                number += 1
                if part.kind != "part" or unit_of(part) != f"worker-{number}":
                    raise BundleError(f"{part.name} is not the backup of worker {number}.")
                part_file.touch(mode=0o600)
    if number + 1 != workers:
        raise BundleError(f"it has the backups of {number + 1} workers, and {workers} made it.")


def place(parts: list[Path], data: Path, workers: int) -> None:
    """Move restored stores and states into a data directory of so many workers. Raises StoreError, OSError."""
    if workers != len(parts):
        whole = _joined(parts)
        parts = [whole] if workers == 1 else [_share(whole, Share(each, workers)) for each in range(workers)]
    if workers == 1:
        # A directory without a store is begun anew, so the store comes last.
        for name in (STATES, STORE):
            if (parts[0] / name).exists():
                (parts[0] / name).rename(data / name)
    else:
        # Until all shares are in place, no number of workers fits the directory.
        write_workers(data, 0)
        for number, part in enumerate(parts):
            part.rename(directory_of(data, number))
        write_workers(data, workers)
    sync_path(data)


def _joined(parts: list[Path]) -> Path:
    """Return the directory of the first part, which has what all parts had."""
    whole, *others = parts
    (whole / STATES).mkdir(exist_ok=True)
    for other in others:
        distance = join(whole / STORE, other / STORE)
        for states in _states(other):
            tree, _ = numbers_of_states(states)
            states.rename(whole / STATES / f"{tree + distance}+{distance}.tar")
        shutil.rmtree(other)
    return whole


def _share(whole: Path, share: Share) -> Path:
    """Return a directory with what a worker has of a whole one."""
    own = whole.with_name(f"share-{share.number}")
    (own / STATES).mkdir(parents=True, mode=0o700)
    (own / STORE).touch(mode=0o600)
    shutil.copyfile(whole / STORE, own / STORE)
    trees = set(keep_share(own / STORE, share))
    for states in _states(whole):
        if numbers_of_states(states)[0] in trees:
            # A tree that several tasks share may belong to several workers. Each removes its own name of the file.
            os.link(states, own / STATES / states.name)
    for path in (own / STORE, own / STATES, own):
        sync_path(path)
    return own


def _workers(manifest: Part) -> int:
    workers = orjson.loads(manifest.data).get("workers", 1)
    return workers if isinstance(workers, int) else 1


def _states(directory: Path) -> list[Path]:
    return sorted((directory / STATES).glob("*.tar"))
