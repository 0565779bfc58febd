"""The scenario whose writes are recorded for cuts of power: a store of schema 1 is unpacked, synced and upgraded."""

import os
import sys
import tarfile
from pathlib import Path

from proxy.storage.store import Store
from tests.power_cuts import tell

OLDER = Path(__file__).with_name("older")


def unpack(name: str, data: Path) -> Path:
    """Unpack a data directory of an older version; return its database."""
    data.mkdir(parents=True, exist_ok=True)
    with tarfile.open(OLDER / f"{name}.tar.xz") as archive:
        archive.extractall(data, filter="data")
    return data / "forkpoint.sqlite"


if __name__ == "__main__":
    database = unpack("schema-1-oldest", Path(sys.argv[1]))
    for path in (database, database.parent):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    tell("unpacked", 1)
    Store(database).close()
