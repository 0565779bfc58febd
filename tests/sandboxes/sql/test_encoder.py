"""Results have the same bytes in the proxy, the workers and the guest."""

import base64
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sandboxes
from sandboxes.sql.results import RowCollector, json_bytes, success

FLOATS = [
    0.0,
    -0.0,
    1e15,
    1e16,
    1e-4,
    9.99e-5,
    1e-5,
    -1.25e-5,
    1e-6,
    1e-7,
    5e-324,
    2.2e-308,
    1.7e308,
]
CONTROLS = "".join(map(chr, range(33))) + '"\\/\x7f\u2028\U0001f600'
FINITE = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), FINITE, st.text())
rows = st.lists(st.lists(scalars, max_size=4), max_size=4)
surrogates = st.text(st.characters(categories=["Cs", "Ll"]))

_GUEST = """
import base64, pickle, sys
sys.path.insert(0, sys.argv[1])
from sandboxes.sql.results import RowCollector, success
for line in sys.stdin:
    rows = pickle.loads(base64.b64decode(line))
    result = success(["a"], RowCollector(100, 1 << 20).add_all(rows))
    print(base64.b64encode(result).decode(), flush=True)
"""

Encode = Callable[[list[list[Any]]], bytes]


@pytest.fixture(scope="module")
def guest_result() -> Iterator[Encode]:
    """Encode rows in a process that, like the guest, cannot import any package but the product."""
    package = str(Path(sandboxes.__file__).parent.parent)
    command = [sys.executable, "-I", "-S", "-B", "-c", _GUEST, package]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def encode(values: list[list[Any]]) -> bytes:
            print(base64.b64encode(pickle.dumps(values)).decode(), file=stdin, flush=True)
            return base64.b64decode(stdout.readline())

        yield encode


@given(st.one_of(rows, st.lists(st.lists(surrogates))))
@example([FLOATS, [2**63, -(2**63), 2**64 - 1, CONTROLS]])
def test_guest_and_proxy_give_equal_bytes(guest_result: Encode, values: list[list[Any]]) -> None:
    """The guest once used `json` and the proxy orjson, so that 1e-7 was 1e-07 in half of the answers."""
    assert guest_result(values) == success(["a"], RowCollector(100, 1 << 20).add_all(values))


@given(st.one_of(rows, st.dictionaries(st.text(), rows)))
@example([CONTROLS, 1e-7, 2**64 - 1])
def test_bytes_are_compact_json(value: Any) -> None:
    """The agent's client reads what was encoded, and the row limit counts bytes without spaces."""
    assert orjson.loads(json_bytes(value)) == value
    assert len(json_bytes(value)) <= len(json.dumps(value, ensure_ascii=False).encode())


@given(surrogates)
def test_lone_surrogates_are_escaped(text: str) -> None:
    """UTF-8 has no surrogates, so they travel as escapes, as the standard encoder's ASCII form has them."""
    assert json.loads(json_bytes(text)) == json.loads(json.dumps(text))


def test_other_objects_are_refused() -> None:
    """A driver that forgets to encode a value must fail, not answer with its `repr` or with what is no JSON."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        json_bytes([b"blob"])
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes([math.nan])
