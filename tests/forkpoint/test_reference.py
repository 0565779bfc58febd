"""The client's reference on the site, which `docs/site/client.py` writes from the docstrings."""

from docs.site.client import CLASSES, client_page
from docs.site.markdown import DOCS
from forkpoint import client
from forkpoint.exchange import Operation


def test_reference_says_what_each_operation_does() -> None:
    """Methods of the client itself, operations that both kinds of client have, and properties."""
    page = client_page()
    assert "### `exec(command: str, *, timeout_s: float | None = None" in page
    assert "- `timeout_s`: Seconds after which the command is ended; None for the task's limit." in page
    assert all(f"### `{name}" in page for name in ("close(", "stats()", "fork(", "base_url`", "ForkpointError`"))
    assert client.Client.__doc__ is not None
    assert client.Client.__doc__.partition("\n")[0] in page


def test_page_names_every_operation() -> None:
    page = (DOCS / "client.md").read_text()
    names = {name for *_, kind in CLASSES for name, value in vars(kind).items() if isinstance(value, Operation)}
    assert len(names) > 20
    missing = {name for name in names if f"`{name}`" not in page}
    assert not missing, f"docs/client.md names every operation, but not {missing}"
