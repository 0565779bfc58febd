"""The reference of the Python client on the site, written from its docstrings."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from forkpoint import client, errors, local, operations, results, to_dataframe, trajectories, trees
from forkpoint.exchange import Operation

_INTRODUCTION = """# Client reference

Every operation and result of the [Python client](client.md), from its docstrings. Operations of an `Async…` class
return what is written here when they are awaited.

"""
CLASSES: tuple[tuple[str, type, type], ...] = (
    ("`Client`, `AsyncClient`", client.Client, operations.ProxyOperations),
    ("`Task`, `AsyncTask`", client.Task, operations.TaskOperations),
    ("`Rollout`, `AsyncRollout`", client.Rollout, operations.RolloutOperations),
)
RESULTS = tuple(
    value
    for module in (results, trees, trajectories, errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
)


def client_page() -> str:
    """Return the page's Markdown."""
    functions = {"local": local, "to_dataframe": to_dataframe}
    parts = [f"## `forkpoint.{name}`\n{_function(name, function)}" for name, function in functions.items()]
    for title, kind, described in CLASSES:
        own = [
            _function(name, value) for name, value in vars(kind).items()
            if not name.startswith("_") and inspect.isfunction(value)
        ]  # fmt: skip
        inherited = [
            _function(name, vars(described)[name].__get__(None, described))
            for name, value in vars(described).items()
            if isinstance(value, Operation)
        ]
        urls = [
            f"### `{name}`\n{_text(inspect.getdoc(value) or '')}\n"
            for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, property)
        ]  # fmt: skip
        parts.append("\n".join([f"## {title}\n{_text(inspect.getdoc(kind) or '')}\n", *own, *inherited, *urls]))
    parts.append("## Results and errors\n" + "\n".join(_result(kind) for kind in RESULTS))
    return _INTRODUCTION + "\n".join(parts)


def _function(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    arguments = str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))
    # As a reader imports them, without the modules that they come from.
    arguments = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", arguments)
    returned = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", _returned(signature.return_annotation))
    if hasattr(function, "__wrapped__") and returned.startswith("Iterator"):
        returned = f"context manager of {returned[9:-1]}"
    return f"### `{name}{arguments}`{f' → `{returned}`' if returned else ''}\n{_text(inspect.getdoc(function) or '')}\n"


def _returned(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    wrapped = re.fullmatch(r"(?:[\w.]+\.)?ApiRequest\[(.*)\]", text)
    inner = wrapped[1] if wrapped else text
    return "" if inner in ("None", "NoneType", "inspect._empty", "_empty") else inner


def _result(kind: type) -> str:
    bases = [base.__name__ for base in kind.__bases__ if is_dataclass(base)]
    head = f"### `{kind.__name__}`{f' ({bases[0]})' if bases else ''}"
    return "\n".join([head, _text(inspect.getdoc(kind) or ""), *_properties(kind), ""])


def _properties(kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        if isinstance(value, property):
            yield f"- `{name}`: {' '.join((inspect.getdoc(value) or '').split())}"


def _text(doc: str) -> str:
    """Return a docstring in Google's style as Markdown: its sections become lists."""
    lines: list[str] = []
    for line in doc.splitlines():
        entry = re.fullmatch(r" {4}([\w, ]+): (.*)", line)
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            continue
        if entry:
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif line.startswith("        ") and lines:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines).strip()
