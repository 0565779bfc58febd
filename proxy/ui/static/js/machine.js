// Live sandboxes and snapshots, with the reason why each exists.

import { get, items } from "./api.js";
import { grid, h, panel, put, showPanels, thead } from "./dom.js";
import { bytes, count, percent, seconds } from "./format.js";
import { watch } from "./live.js";

export function sandboxes(context) {
  return list(context, {
    title: "Live sandboxes",
    path: "sandboxes",
    empty: "No sandbox is running. The first miss starts one.",
    heads: [["State"], ["Task"], ["Node"], ["Rollout"], ["Purpose"], ["Calls", "num"], ["Age", "num"], ["Idle", "num"]],
    row: (s) => [
      h("span", { class: s.warm ? "chip live" : "chip" }, s.warm ? "warm" : s.state),
      s.task ? h("a", { href: `#/t/${encodeURIComponent(s.task)}`, class: "mono" }, s.task) : "–",
      place(s.task, s.node),
      s.task && s.rollout ? h("a", { href: `#/t/${encodeURIComponent(s.task)}/r/${encodeURIComponent(s.rollout)}`, class: "mono" }, s.rollout) : "–",
      h("span", { class: "dim" }, s.why),
      count(s.calls),
      seconds(s.age_s),
      s.state === "idle" ? seconds(s.idle_s) : "–",
    ],
    about: (s) => [s.task, s.node, s.rollout, s.state, s.why].join(" "),
  });
}

export function snapshots(context) {
  return list(context, {
    title: "Snapshots",
    path: "snapshots",
    empty: "There are no snapshots. One is taken when it is expected to save more seconds than it costs.",
    heads: [["Task"], ["Node"], ["Holds"], ["Why kept"], ["Size", "num"], ["Took", "num"], ["Restores in", "num"], ["Uses", "num"], ["Expected", "num"]],
    row: (s) => [
      h("a", { href: `#/t/${encodeURIComponent(s.task)}`, class: "mono" }, s.task || "–"),
      place(s.task, s.node),
      h("span", { class: "chip" }, s.kind),
      h("span", { class: "dim" }, s.why),
      bytes(s.size_bytes),
      seconds(s.cost_s),
      s.restore_s ? seconds(s.restore_s) : "–",
      count(s.uses),
      s.expected_uses.toPrecision(2),
    ],
    about: (s) => [s.task, s.node, s.kind, s.why].join(" "),
    above: async (signal) => budget(await get("stats", { signal })),
  });
}

const place = (task, node) => (task && node ? h("a", { href: `#/t/${encodeURIComponent(task)}/n/${node}`, class: "mono" }, node) : (node ?? "–"));

function budget(stats) {
  const used = stats.snapshot_bytes / (stats.snapshot_budget_bytes || 1);
  return `${bytes(stats.snapshot_bytes)} of ${bytes(stats.snapshot_budget_bytes)} (${percent(used)})`;
}

async function list({ main, params, signal, setParams }, { title, path, heads, row, about, empty, above }) {
  let found = [];
  const body = h("tbody");
  const note = h("span", { class: "note" });
  const none = h("p", { class: "empty" }, empty);
  const search = h("input", {
    type: "search", placeholder: "Filter", "aria-label": "Filter", value: params.get("q") ?? "",
    on: { input: () => { setParams({ q: search.value }); draw(); } },
  });
  let summary = "";
  const draw = () => {
    const chosen = found.filter((entry) => about(entry).toLowerCase().includes(search.value.toLowerCase()));
    put(body, chosen.map((entry) => h("tr", {}, row(entry).map((cell, i) => h("td", { class: heads[i][1] ?? (heads[i][0].startsWith("Why") ? "wide" : "") }, cell)))));
    note.textContent = [count(found.length), summary].filter(Boolean).join(" · ");
    none.hidden = found.length > 0;
  };
  const look = async () => {
    [found, summary] = await Promise.all([items(path, { signal }), above ? above(signal) : ""]);
    if (!body.contains(document.activeElement)) draw();
  };
  await look();
  showPanels(main, panel({}, [h("h1", {}, title), note, h("span", { class: "gap" }), search], grid({}, thead(heads), body), none));
  watch(look, signal, 2000);
}
