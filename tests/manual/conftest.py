"""The built site, once for all tests of this folder."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from docs.site.markdown import ROOT


@pytest.fixture(scope="session")
def site() -> Iterator[Path]:
    """Build the site as `./run docs` does. A warning, such as a page without a place in the navigation, fails."""
    with TemporaryDirectory(prefix="forkpoint-site-") as folder:
        target = Path(folder) / "site"
        built = subprocess.run(
            [sys.executable, "-m", "docs.site.build", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert built.returncode == 0, f"{built.stdout}\n{built.stderr}"
        yield target
