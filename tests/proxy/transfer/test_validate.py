"""Bundles with valid digests and false content are refused."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.transfer.format import Part, Writer, read
from tests.proxy.transfer.rig import verdict

Change = Callable[[list[tuple[Part, Any]]], None]


def forged(bundle: bytes, change: Change) -> bytes:
    """Return a bundle of changed content under right digests: what a hostile hand would make."""
    parts = [(part, _lines(part)) for part in read(io.BytesIO(bundle)) if part.kind != "seal"]
    change(parts)
    writer = Writer()
    made = b""
    for part, lines in parts:
        if part.kind == "manifest":
            made += writer.json("manifest", lines)
        elif part.kind == "batch":
            made += writer.part("batch", b"\n".join(orjson.dumps(line) for line in lines))
        else:
            made += writer.part(part.kind, part.stored, part.digest)
    return made + writer.seal()


def _lines(part: Part) -> Any:
    if part.kind == "manifest":
        return orjson.loads(part.data)
    return [orjson.loads(line) for line in part.data.split(b"\n")] if part.kind == "batch" else None


def lines(parts: list[tuple[Part, Any]]) -> list[dict[str, Any]]:
    return next(opened for part, opened in parts if part.kind == "batch")


def records(parts: list[tuple[Part, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines(parts) if "key" in line]


def drop_node(parts: list[tuple[Part, Any]]) -> None:
    lines(parts).remove(next(line for line in lines(parts) if line.get("node") == 1))


def cycle(parts: list[tuple[Part, Any]]) -> None:
    first = next(record for record in records(parts) if record["target"] == 1)
    first["source"] = 1
    first["target"] = 1


def swap(parts: list[tuple[Part, Any]]) -> None:
    first = next(record for record in records(parts) if record["target"] == 1)
    first["source"], first["target"] = 2, 1


def twice(parts: list[tuple[Part, Any]]) -> None:
    lines(parts).append(records(parts)[-1])


def other_key(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["key"] = "00" * 32


def no_answer(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["answer"] = "00" * 32


def wrong_answer(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["answer"] = records(parts)[0]["call"]


def no_effect(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["effect"] = 0


def huge(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["source"] = 1 << 62


def lost_line(parts: list[tuple[Part, Any]]) -> None:
    lines(parts).pop()


def other_root(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["root_key"] = "ab" * 16


def other_spec(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["spec"]["files"]["/root/seed"] = "another\n"


def other_driver(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["spec"]["driver"] = "other"


def other_format(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["format"] = 2


def other_keys(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["key_version"] = 1


def no_manifest(parts: list[tuple[Part, Any]]) -> None:
    del parts[0][1]["spec"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_node, "does not exist"), (cycle, "cycle"), (swap, "cycle"), (twice, "holds this call twice"),
        (other_key, "its key is not"), (no_answer, "is not in the file"), (wrong_answer, "cannot be read"),
        (no_effect, "effect contradicts"), (huge, "cannot be read"), (lost_line, "its manifest states"),
        (other_root, "root state"), (other_spec, "root state"), (other_driver, "cannot be used here"),
        (other_format, "format is 2"), (other_keys, "keys of version 1"), (no_manifest, "is not a manifest"),
    ],
)  # fmt: skip
def test_a_forged_bundle_is_refused_with_the_reason(bundle: bytes, tmp_path: Path, change: Change, reason: str) -> None:
    """Each change keeps all digests and the seal valid, so only the check of the content can detect it."""
    assert reason in verdict(forged(bundle, change), tmp_path)
