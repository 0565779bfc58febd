"""The `sqlite` driver keeps the contract of SQL drivers."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandboxes.spec import EnvironmentSpec
from sandboxes.sqlite.driver import SqliteDriver
from tests.sandboxes.sql_contract import SqlContract
from tests.sandboxes.sqlite_files import folder_digest, forks, make, spec_of


class TestSqlite(SqlContract):
    endless: ClassVar[str] = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n"
    parameters: ClassVar[str] = "SELECT ?, ?, ?"
    missing: ClassVar[EnvironmentSpec] = spec_of("/nowhere/at/all.db")

    @pytest.fixture
    def driver(self, tmp_path: Path) -> SqliteDriver:
        return SqliteDriver(tmp_path / "data")

    @pytest.fixture
    def spec(self, tmp_path: Path) -> EnvironmentSpec:
        (tmp_path / "source").mkdir()
        return spec_of(make(tmp_path / "source" / "shop.db"))

    def forks(self, driver: Any) -> int:
        return forks(driver)

    def source(self, spec: EnvironmentSpec) -> Any:
        source = spec.databases["shop"].source
        assert isinstance(source, str)
        return folder_digest(Path(source).parent)
