"""E2B: envelopes of the Connect protocol."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.e2b import connect_rpc as connect
from proxy.refusals import RefusalError

JSON = st.dictionaries(st.text(), st.recursive(st.none() | st.integers(-9, 9) | st.text(), st.lists, max_leaves=5))


@given(st.lists(JSON, max_size=4))
def test_envelopes_round_trip(values: list[dict[str, Any]]) -> None:
    """A stream of envelopes is read back as the messages that were written."""
    assert connect.messages(b"".join(map(connect.envelope, values)) + connect.end()) == values


@given(JSON, st.data())
def test_truncated_stream_is_refused(value: dict[str, Any], data: st.DataObject) -> None:
    """A request that ends within an envelope is refused, wherever it ends."""
    whole = connect.envelope(value)
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(RefusalError):
        connect.messages(whole[:cut])
