"""Views of all workers, put together from the view of each (pure). A view is JSON, or a text of metrics."""

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from proxy.control.metrics import WrongAnswers

Json = dict[str, Any]

_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")


def merged_page(pages: Sequence[Json], key: str, *, descending: bool, limit: int) -> tuple[list[Any], list[int]]:
    """Return the items of a page of all workers, and how many of them come from each worker."""

    def order(item: tuple[int, Json]) -> tuple[bool, Any]:
        # A time that is null comes before all others: in the list it is 0.
        value = item[1][key]
        return (value is not None, 0 if value is None else value)

    parts = ([(number, item) for item in page["items"]] for number, page in enumerate(pages))
    merged = list(heapq.merge(*parts, key=order, reverse=descending))[:limit]
    taken = [0] * len(pages)
    for number, _ in merged:
        taken[number] += 1
    return [item for _, item in merged], taken


def merged_stats(views: Sequence[Json]) -> Json:
    """Return the totals of all workers."""
    total = added(views)
    calls = total["calls"]
    total |= {
        "since": min(view["since"] for view in views),
        "uptime_s": max(view["uptime_s"] for view in views),
        "hit_rate": (total["hits"] + total["waits"]) / calls if calls else 0.0,
        "snapshots_full": any(view["snapshots_full"] for view in views),
        "reuse_rate": sum(view["reuse_rate"] for view in views) / len(views),
        # Costs are measured by each worker, on the same machine: those with the most measurements are shown.
        "costs": {
            driver: max(
                (view["costs"][driver] for view in views if driver in view["costs"]),
                key=lambda costs: sum(costs["measured"].values()),
            )
            for driver in views[0]["costs"]
        },
    }  # fmt: skip
    return total


def merged_steps(lists: Sequence[Sequence[Json]]) -> list[Json]:
    """Return the steps of all workers' timelines, which end at the same time, oldest first."""
    steps = []
    for back in range(1, max(map(len, lists)) + 1):
        here = [steps[-back] for steps in lists if len(steps) >= back]
        steps.append({**added(here), "at": max(step["at"] for step in here)})
    return steps[::-1]


def merged_wrong_answers(pages: Sequence[Json]) -> list[Json]:
    """Return the rates of wrong answers over the audits of all workers, by the kind of sample."""
    totals: dict[str, list[int]] = {}
    for item in (item for page in pages for item in page["items"]):
        known = totals.setdefault(item["sample"], [0, 0])
        known[0] += item["checked"]
        known[1] += item["differing"]
    return [asdict(WrongAnswers.of(sample, *counts)) for sample, counts in totals.items()]


def added(views: Sequence[Mapping[str, Any]]) -> Json:
    """Return the sum of views, member by member: numbers are added, lists joined, others are of the first view."""
    total: Json = {}
    for name in {name: None for view in views for name in view}:
        values = [view[name] for view in views if name in view]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            total[name] = sum(values)
        elif all(isinstance(value, dict) for value in values):
            total[name] = added(values)
        elif all(isinstance(value, list) for value in values):
            total[name] = [item for value in values for item in value]
        else:
            total[name] = values[0]
    return total


def merged_metrics(texts: Mapping[int, bytes]) -> bytes:
    """Return the metrics of all workers in Prometheus' text format. Each sample has the label `worker`."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for number, text in texts.items():
        label, family = b'worker="%d"' % number, b""
        for line in text.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif match := _NAME.match(line):
                rest = line[match.end() :]
                labelled = b"{%b,%b" % (label, rest[1:]) if rest.startswith(b"{") else b"{%b}%b" % (label, rest)
                samples.setdefault(family, []).append(match[0] + labelled)
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return b"\n".join(lines) + b"\n"
