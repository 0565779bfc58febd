"""What a built-in tool takes, declared once: checks, OpenAPI's text and MCP's schema follow from it (pure)."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from proxy.refusals import RefusalError

M = TypeVar("M", bound="ToolArguments")


class ToolArguments(BaseModel):
    """The arguments of a tool. A member with a default may be left out."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def checked_arguments(tool: str, kind: type[M], given: Mapping[str, Any], *, strict: bool = True) -> M:
    """Return a tool's arguments with defaults; `strict` converts no types. Raises RefusalError (422)."""
    try:
        return kind.model_validate(given, strict=strict)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'][:1])) or 'body'}: {e['msg']}" for e in error.errors()[:3])
        takes = ", ".join(kind.model_fields) or "nothing"
        raise RefusalError(422, "arguments", f"{tool} takes {takes}. {faults}.") from None


def can_run(kind: type[ToolArguments], recorded: Mapping[str, Any]) -> bool:
    """Return whether a recorded call has what the tool takes, with defaults filled in; it may have more."""
    try:
        kind.model_validate(recorded, strict=True, extra="ignore")
    except ValidationError:
        return False
    return all(name in recorded for name, member in kind.model_fields.items() if member.default is not None)


@cache
def schema_of(kind: type[ToolArguments]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which callers do not change."""
    schema = kind.model_json_schema()
    members = {name: _plain(member) for name, member in schema["properties"].items()}
    return {
        "type": "object", "properties": members, "required": schema.get("required", []), "additionalProperties": False,
    }  # fmt: skip


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a member's schema without the title, and without null, which stands for a member that is left out."""
    kept = {k: v for k, v in schema.items() if k != "title" and (k, v) != ("default", None)}
    forms = [form for form in kept.pop("anyOf", ()) if form != {"type": "null"}]
    return {**(forms[0] if len(forms) == 1 else {"anyOf": forms} if forms else {}), **kept}


class BuiltInTool(NamedTuple):
    """A tool as a model sees it."""

    kind: type[ToolArguments]
    description: str
    reads: bool = False  # Whether the tool never changes the state (MCP's `readOnlyHint`).

    def listed(self, name: str) -> dict[str, Any]:
        """Return the tool's entry in MCP's `tools/list`."""
        schema = schema_of(self.kind)
        # Clients that give every argument, such as smolagents, need to know which may be null.
        members = {
            member: about if member in schema["required"] else {**about, "nullable": True}
            for member, about in schema["properties"].items()
        }
        return {
            "name": name, "description": self.description, "inputSchema": {**schema, "properties": members},
            "annotations": {"readOnlyHint": self.reads},
        }  # fmt: skip
