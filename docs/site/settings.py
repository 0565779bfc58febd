"""The settings reference of the site, written from the declarations in `proxy/settings.py`."""

from collections.abc import Iterator, Mapping
from typing import Any

from docs.site.rest import cell, kind_of
from proxy.settings import Settings

_INTRODUCTION = """# Settings reference

Every setting of `forkpoint serve`, from its declaration. A setting comes from an option where there is one, from the
environment variable, or from a key of a TOML file (`--config`); the first source that has it wins.
[Deploying](deploying.md#settings) has those that you will change first.

| Setting | Variable | Type | Default | Meaning |
|---|---|---|---|---|
"""


def settings_page() -> str:
    """Return the page's Markdown."""
    return _INTRODUCTION + "\n".join(_rows(Settings.model_json_schema())) + "\n"


def _rows(schema: Mapping[str, Any]) -> Iterator[str]:
    for name, each in schema["properties"].items():
        variable = f"`FORKPOINT_{name.upper()}`"
        yield f"| `{name}` | {variable} | {_bounded(each)} | {_default(each)} | {cell(each.get('description', ''))} |"


def _bounded(each: Mapping[str, Any]) -> str:
    """Return a setting's type with its bounds."""
    plain = next((kind for kind in each.get("anyOf", ()) if kind.get("type") != "null"), each)
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    parts = [kind_of(plain), *(f"{words} {plain[name]}" for name, words in bounds.items() if name in plain)]
    return " ".join(parts)


def _default(each: Mapping[str, Any]) -> str:
    value = each.get("default")
    if value is None or value == []:
        return "none"
    if isinstance(value, dict):
        return "`{}`"
    if isinstance(value, list):
        return ", ".join(f"`{part}`" for part in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
