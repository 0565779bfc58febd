"""A short run of `bench.misspath`: tables are printed, and every answer in them is right."""

import pytest

from bench.misspath import main
from tests.machine import require_sandboxes

SHORT = (
    "--only calls,hits,depths --beside pipe --rounds 1 --concurrency 2 --calls 2 --missing 2 --seconds 0.5 "
    "--depths 1,3 --bases host,image --divergences 2"
)


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    require_sandboxes()
    main(SHORT.split())
    output = capsys.readouterr().out
    for row in ("1. A file call", "1. A read-only call", "bash over a pipe", "beside 2 missing", "host  ", "image "):
        assert row in output
