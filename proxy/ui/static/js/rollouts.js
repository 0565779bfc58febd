// The list of a task's rollouts: how each did, by hit rate, saved seconds and reward, in groups, with any number to compare.

import { PAGE, get, list, names } from "./api.js";
import { grid, h, panel, put, say, showPanels } from "./dom.js";
import { ago, count, oneLine, percent, plural, seconds } from "./format.js";
import { watch } from "./live.js";
import { compare, rewardOf } from "./tree/ways.js";
import { treesOf } from "./trees.js";

const ROOTS = 4;

const COLUMNS = [
  ["rollout", "Rollout", "", (r) => r.rollout],
  ["state", "State", "", (r) => r.state],
  ["group", "Labels", "", (r) => labelText(r)],
  ["reward", "Reward", "num", (r) => r.reward ?? -Infinity],
  ["calls", "Calls", "num", (r) => r.calls],
  ["rate", "Hit rate", "num", (r) => r.rate ?? -1],
  ["saved", "Saved", "num", (r) => r.saved ?? -1],
  ["executed", "Executed", "num", (r) => r.executed ?? -1],
  ["used", "Last call", "num", (r) => r.used_at],
  ["begun", "Begun", "num", (r) => r.created_at],
];

export async function rolloutList({ main, params, signal, setParams }, task) {
  const body = h("tbody");
  const note = h("span", { class: "note" });
  const search = h("input", { type: "search", placeholder: "Name, state, label=value", "aria-label": "Filter rollouts", value: params.get("q") ?? "", on: { input: () => { setParams({ q: search.value }); draw(); } } });
  const button = h("button", { disabled: true, on: { click: () => (location.hash = `#/t/${names(task)}/compare?r=${[...picked].map((name) => names(name)).join(",")}`) } }, "Compare");
  const environment = h("th", { scope: "col", hidden: true }, "Environment");
  const picked = new Set();
  let [order, up] = [params.get("sort") ?? "begun", params.get("up") === "1"];
  let found = [];
  let total = 0;
  let wanted = PAGE;
  const older = h("button", { hidden: true, on: { click: async () => { wanted += PAGE; await look(); } } }, "Show older rollouts");
  const advice = h("p", { class: "dim" });
  let titles = new Map();
  const heads = COLUMNS.map(([name, title, kind]) => h("th", { scope: "col", class: kind, data: { name } }, h("button", { on: { click: () => sortBy(name) } }, title)));
  const sortBy = (name) => {
    up = order === name ? !up : name === "rollout";
    order = name;
    setParams({ sort: order === "begun" ? null : order, up: up ? "1" : null });
    draw();
  };
  const draw = () => {
    // Each word of the filter is part of the name, of the state, or of a label such as `run=r7`.
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = found.filter((r) => { const text = `${r.rollout} ${r.state} ${labelText(r)}`.toLowerCase(); return words.every((word) => text.includes(word)); });
    const key = COLUMNS.find(([name]) => name === order)?.[3] ?? COLUMNS.at(-1)[3];
    chosen.sort((a, b) => inOrder(key(a), key(b)) * (up ? 1 : -1) || compare(a.rollout, b.rollout));
    for (const head of heads) {
      if (head.dataset.name === order) head.setAttribute("aria-sort", up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    put(body, chosen.map(row));
    say(note, found.length < total ? `the newest ${count(found.length)} of ${plural(total, "rollout")}` : plural(total, "rollout"));
    older.hidden = found.length >= total;
    button.disabled = picked.size < 2;
    button.textContent = picked.size > 1 ? `Compare ${picked.size}` : "Compare";
  };
  const row = (r) =>
    h(
      "tr", { data: { rollout: r.rollout } },
      h("td", {}, h("input", { type: "checkbox", checked: picked.has(r.rollout), "aria-label": `Compare ${r.rollout}`, on: { change: (event) => { picked[event.target.checked ? "add" : "delete"](r.rollout); draw(); } } })),
      h("td", {}, h("a", { class: "mono", href: `#/t/${names(task)}/r/${names(r.rollout)}` }, r.rollout)),
      h("td", {}, h("span", { class: r.state === "running" ? "chip live" : "chip" }, r.state)),
      h("td", { class: "cut", title: labelText(r) }, labelText(r)),
      h("td", { class: "num" }, r.reward === null ? "–" : r.reward.toPrecision(3).replace(/\.?0+$/, "")),
      h("td", { class: "num" }, count(r.calls)),
      h("td", { class: "num" }, r.rate === undefined ? "–" : percent(r.rate)),
      h("td", { class: "num" }, r.saved === undefined ? "–" : seconds(r.saved)),
      h("td", { class: "num" }, r.executed === undefined ? "–" : seconds(r.executed)),
      h("td", { class: "num" }, ago(r.used_at)),
      h("td", { class: "num" }, ago(r.created_at)),
      environment.hidden ? null : h("td", { class: "cut" }, h("a", { href: `#/t/${names(task)}?root=${r.root}` }, titles.get(r.root) ?? r.root)),
      h("td", {}, h("a", { class: "mono", href: `#/t/${names(task)}?node=${r.node}` }, r.node)),
    );
  const look = async () => {
    const [listed, trees, view] = await Promise.all([list(`tasks/${names(task)}/rollouts?sort=-created_at`, { signal, most: wanted }), treesOf(task, signal), get(`tasks/${names(task)}`, { signal })]);
    say(advice, view.advice);
    const rows = listed.items;
    total = listed.total;
    const sums = await sumsOf(task, [...new Set(rows.map((r) => r.root))].slice(0, ROOTS), signal);
    found = rows.map((r) => ({ ...r, ...sums.get(r.rollout), reward: rewardOf(r) }));
    titles = new Map(trees.map((tree) => [tree.root, oneLine(tree.title)]));
    environment.hidden = trees.length < 2;
    // Do not replace the rows while one of them has the focus.
    if (!body.contains(document.activeElement)) draw();
  };
  await look();
  showPanels(
    main,
    panel(
      {},
      [h("h1", {}, "Rollouts"), note, h("span", { class: "gap" }), search, h("a", { class: "button", href: `#/t/${names(task)}?lanes=1` }, "As lanes"), button],
      grid({}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "sr" }, "Compare")), heads, environment, h("th", { scope: "col" }, "At"))), body),
      h("div", { class: "body" }, older, advice),
    ),
  );
  watch(look, signal, 2000);
}

/** Return hit rate, saved and executed seconds of the newest rollouts of trees, by name. */
async function sumsOf(task, roots, signal) {
  const sums = new Map();
  const views = await Promise.all(roots.map((root) => get(`tasks/${names(task)}/ways?limit=${PAGE}&root=${root}`, { signal })));
  for (const way of views.flatMap((view) => view.items)) {
    const given = [...way.outcomes].map((kind) => kind === "h" || kind === "w");
    const sum = (wanted) => way.seconds.reduce((total, s, at) => total + (given[at] === wanted ? s : 0), 0);
    if (!sums.has(way.rollout)) sums.set(way.rollout, given.length ? { rate: given.filter(Boolean).length / given.length, saved: sum(true), executed: sum(false) } : {});
  }
  return sums;
}

const inOrder = (a, b) => (typeof a === "string" ? compare(a, b) : a - b);

const labelText = (rollout) => Object.entries(rollout.labels).map(([name, value]) => `${name}=${value}`).join(" ");
