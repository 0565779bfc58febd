"""Times as the proxy sends them: seconds since 1970 inside, ISO 8601 in UTC outside. Pure."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import PlainSerializer, WithJsonSchema

_LAST = 253_402_300_799.0
"""The last second of the year 9999, in seconds since 1970: the last that ISO 8601 has four digits for."""


def utc_text(seconds: float) -> str:
    """Return a time in UTC with microseconds; texts sort as times do. Times beyond 1970 to 9999 are cut."""
    known = datetime.fromtimestamp(min(max(seconds, 0.0), _LAST), UTC)
    return known.isoformat(timespec="microseconds").replace("+00:00", "Z")


UtcTime = Annotated[
    float,
    PlainSerializer(utc_text, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization"),
]
"""A time of a view: seconds since 1970, which JSON has as the text of `utc_text`."""
