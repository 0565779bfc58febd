"""The answers of models by question, kept for all tasks within a budget of bytes."""

import sqlite3
import time
from pathlib import Path


class AnswerMemo:
    """A SQLite file of answers. One thread uses it; a look-up takes some microseconds."""

    def __init__(self, path: Path, budget_bytes: int = 512 << 20) -> None:
        self._path, self._budget_bytes = path, budget_bytes
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file. A damaged file is deleted, because every question in it can be sent again."""
        try:
            self._database = self._opened()
        except sqlite3.DatabaseError:
            self._path.unlink(missing_ok=True)
            self._database = self._opened()

    def _opened(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(
            "CREATE TABLE IF NOT EXISTS answers (question BLOB PRIMARY KEY, answer BLOB NOT NULL, used REAL NOT NULL)"
            " WITHOUT ROWID"
        )
        return database

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def find(self, question: bytes) -> bytes | None:
        """Return the answer to a question; None if it was never sent or its answer was evicted."""
        assert self._database is not None
        row = self._database.execute("SELECT answer FROM answers WHERE question = ?", [question]).fetchone()
        if row is None:
            return None
        self._database.execute("UPDATE answers SET used = ? WHERE question = ?", [time.time(), question])
        return bytes(row[0])

    def keep(self, question: bytes, answer: bytes) -> None:
        """Keep the first answer to a question. Over budget, the tenth of the answers used longest ago is evicted."""
        assert self._database is not None
        self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", [question, answer, time.time()])
        if self._size_bytes() > self._budget_bytes:
            self._database.execute(
                "DELETE FROM answers WHERE question IN"
                " (SELECT question FROM answers ORDER BY used LIMIT 1 + (SELECT count(*) / 10 FROM answers))"
            )

    def _size_bytes(self) -> int:
        assert self._database is not None
        ((size,),) = self._database.execute(
            "SELECT (page_count - freelist_count) * page_size"
            " FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
        )
        return int(size)
