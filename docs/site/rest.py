"""The REST reference of the site, written from the proxy's OpenAPI description."""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI

from proxy.control.api_description import completed
from proxy.control.routes.api import control_routes
from proxy.ui.api import page_data

_METHODS = ("get", "put", "post", "patch", "delete")
_INTRODUCTION = """# REST reference

Every operation of the control plane and of the shell endpoint, from the proxy's own description. A running proxy shows
the same at `/docs` and has it at `/openapi.json`. [The HTTP interface](wire.md) explains addresses, headers, errors
and order.
"""


def rest_page() -> str:
    """Return the page's Markdown."""
    app = FastAPI(routes=[*control_routes, *page_data.routes])
    schema = completed(app.openapi())
    groups: dict[str, list[str]] = {}
    for path, operations in sorted(schema["paths"].items()):
        for method in _METHODS:
            if method in operations:
                operation = operations[method]
                group = str((operation.get("tags") or [_group(path)])[0])
                groups.setdefault(group, []).append("\n".join(_operation(method, path, operation, schema)))
    parts = [f"## {group}\n\n" + "\n\n".join(entries) for group, entries in sorted(groups.items())]
    return "\n\n".join([_INTRODUCTION, *parts]) + "\n"


def _group(path: str) -> str:
    segments = [segment for segment in path.split("/")[3:] if not segment.startswith("{")]
    return (segments[1:] or segments or ["proxy"])[0]


def _operation(method: str, path: str, operation: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### `{method.upper()} {path}`\n"
    text = operation.get("description") or operation.get("summary") or ""
    yield " ".join(text.split()) + "\n"
    rows = [*_parameters(operation), *_body(operation, schema)]
    if rows:
        yield "| Parameter | In | Type | Meaning |"
        yield "|---|---|---|---|"
        yield from rows
        yield ""
    answers = ", ".join(
        f"{status} {_type(answer)}".strip() for status, answer in operation.get("responses", {}).items()
    )
    yield f"Responses: {answers}."


def _parameters(operation: Mapping[str, Any]) -> Iterator[str]:
    for each in operation.get("parameters", ()):
        name = f"`{each['name']}`" + ("" if each.get("required") else " (optional)")
        yield f"| {name} | {each['in']} | {kind_of(each.get('schema', {}))} | {cell(each.get('description', ''))} |"


def _body(operation: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        kind = _resolved(content.get("schema", {}), schema)
        required = kind.get("required", ())
        for name, inner in kind.get("properties", {}).items():
            title = f"`{name}`" + ("" if name in required else " (optional)")
            yield f"| {title} | body | {kind_of(inner)} | {cell(inner.get('description', ''))} |"
        if not kind.get("properties"):
            yield f"| | body | `{media}` | {cell(kind.get('description', ''))} |"


def _resolved(kind: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in kind:
        kind = schema["components"]["schemas"][kind["$ref"].rpartition("/")[2]]
    return kind


def kind_of(kind: Mapping[str, Any]) -> str:
    """Return a JSON schema in a word or two."""
    if "$ref" in kind:
        return f"`{kind['$ref'].rpartition('/')[2]}`"
    if "anyOf" in kind:
        return " or ".join(kind_of(each) for each in kind["anyOf"])
    if kind.get("type") == "array":
        return f"array of {kind_of(kind.get('items', {}))}"
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    return str(kind.get("type", "any"))


def _type(answer: Mapping[str, Any]) -> str:
    for media, content in answer.get("content", {}).items():
        return kind_of(content["schema"]) if content.get("schema", {}).keys() & {"$ref", "type"} else f"`{media}`"
    return ""


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
