"""What a spec shows to others."""

import pytest

from sandboxes.spec import Database, EnvironmentSpec


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://me:secret@db:5432/x", "postgresql://me:***@db:5432/x"),
        ("postgresql://me@db/x?password=secret&sslmode=require", "postgresql://me@db/x?password=***&sslmode=require"),
        ("host=db password=secret user=me", "host=db password=*** user=me"),
        (r"password = 'se cr\'et' host=db", "password = *** host=db"),
        ("host=db passfile=/etc/pgpass", "host=db passfile=/etc/pgpass"),
        ("postgresql://me@db:5432/x", "postgresql://me@db:5432/x"),
        ("postgresql:///x?host=/run", "postgresql:///x?host=/run"),
    ],
)
def test_redacted_spec_has_no_password(dsn: str, shown: str) -> None:
    spec = EnvironmentSpec(driver="postgres", databases={"x": Database(dsn=dsn, source="x")})
    assert spec.redacted().databases["x"].dsn == shown
    assert spec.databases["x"].dsn == dsn
