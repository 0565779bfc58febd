"""A proxy over the in-memory driver, one for each test module that has no other."""

from collections.abc import Iterator

import pytest

from tests.proxy.serving import Running, serving


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        yield running
