"""Calls in one line each, and whether they failed: what a list of thousands of nodes shows of them."""

from collections import OrderedDict

import orjson

from proxy.storage.records import RecordStore
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall, ToolResult

TITLE_CHARS = 200
_REMEMBERED = 200_000


def title(call: ToolCall) -> str:
    """Return a call in one line: a command or a statement as it is, of any other call its tool and arguments."""
    for endpoint, member in (("shell", "command"), ("sql", "sql")):
        text = call.arguments.get(member)
        if call.endpoint == endpoint and isinstance(text, str):
            return text
    arguments = orjson.dumps(call.arguments).decode() if call.arguments else ""
    return f"{call.endpoint}/{call.tool} {arguments}".rstrip()


def exit_code(result: ToolResult) -> int | None:
    """Return the exit code that an answer tells, None where it tells none."""
    if result.media_type != "application/json":
        return None
    try:
        value = orjson.loads(result.body)
    except orjson.JSONDecodeError:
        # A tool server's word for it is not always true.
        return None
    code = value.get("exit_code") if isinstance(value, dict) else None
    return code if isinstance(code, int) else None


class Titles:
    """Titles and exit codes of records, read from the store once."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self._known: OrderedDict[int, tuple[str, int | None]] = OrderedDict()

    def of(self, record: Record) -> tuple[str, int | None]:
        """Return a record's title, cut to `TITLE_CHARS`, and its exit code. 30 us the first time."""
        known = self._known.get(record.id)
        if known is None:
            text = title(self._records.call(record))
            known = text[:TITLE_CHARS], exit_code(self._records.result(record))
            self._known[record.id] = known
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return known
