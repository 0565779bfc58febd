// The overview: live totals, a timeline, and a table of tasks.

import { get } from "./api.js";
import { importButton } from "./carry.js";
import { h, put, say } from "./dom.js";
import { ago, bytes, count, percent, seconds, short } from "./format.js";
import { flash, watch } from "./live.js";
import { timeline } from "./timeline.js";
import { videos } from "./videos.js";

const FIGURES = [
  ["hit_rate", "Hit rate"],
  ["saved", "Saved"],
  ["executed", "Executed"],
  ["calls", "Calls"],
  ["running", "Running rollouts"],
  ["sandboxes", "Sandboxes"],
  ["snapshots", "Snapshots"],
  ["checkpoints", "Checkpoints"],
  ["diverged", "Diverged"],
  ["failed", "Failed"],
];

export async function overview({ main, params, signal, setParams }) {
  const figures = new Map(FIGURES.map(([name, title]) => [name, figure(title)]));
  const line = timeline(signal);
  const table = taskTable(params, setParams);
  // A token for some tasks may not see the totals of all.
  const hidden = (error) => {
    if (error.status !== 403) throw error;
    return null;
  };
  const [stats, totals] = await Promise.all([get("stats", { signal }).catch(hidden), get("tasks", { signal })]);
  put(
    main,
    h(
      "div",
      { class: "wrap" },
      h("h1", { class: "sr" }, "Overview"),
      stats && h("dl", { class: "figures", "aria-label": "Totals since this proxy started" }, [...figures.values()].map((f) => f.element)),
      stats && line.element,
      stats && videos(signal),
      table.element,
    ),
  );
  let lastTotals = 0;
  let known = totals;
  const show = (now) => {
    if (now) showFigures(figures, now, known);
    table.show(known);
  };
  show(stats);
  watch(async () => {
    const now = stats && (await get("stats", { signal }));
    if (Date.now() - lastTotals > 1900) {
      known = await get("tasks", { signal });
      lastTotals = Date.now();
    }
    show(now);
  }, signal);
}

function figure(title) {
  const value = h("div", { class: "value" }, "–");
  const sub = h("div", { class: "sub" });
  const bar = h("span");
  const meter = h("span", { class: "meter", hidden: true }, bar);
  const element = h("div", { class: "figure" }, h("dt", {}, title), h("dd", {}, value, sub, meter));
  return {
    element,
    show(text, under = "", share = null) {
      const [number, ...unit] = text.split(" ");
      if (value.dataset.text !== text) {
        value.dataset.text = text;
        put(value, number, unit.length ? h("span", { class: "unit" }, ` ${unit.join(" ")}`) : null);
      }
      say(sub, under);
      sub.title = under;
      meter.hidden = share === null;
      if (share !== null) {
        bar.style.width = `${Math.min(100, share * 100)}%`;
        meter.classList.toggle("full", share > 0.95);
      }
    },
  };
}

function showFigures(figures, s, totals) {
  const show = (name, ...values) => figures.get(name).show(...values);
  const live = Object.values(s.sandboxes).reduce((a, b) => a + b, 0);
  const running = totals.reduce((sum, task) => sum + task.running, 0);
  const failures = Object.values(s.failures).reduce((a, b) => a + b, 0);
  show("hit_rate", percent(s.hit_rate), `${short(s.hits)} hits, ${short(s.waits)} waits`);
  show("saved", seconds(s.saved_s), "of tool time");
  show("executed", seconds(s.executed_s), `${seconds(s.replayed_s)} replayed`);
  show("calls", short(s.calls), `${short(s.misses)} misses${s.bypasses ? `, ${short(s.bypasses)} bypasses` : ""}`);
  show("running", count(running), `${short(totals.reduce((sum, task) => sum + task.rollouts, 0))} in all`);
  const most = s.sandboxes_budget ?? null;
  const states = Object.entries(s.sandboxes).map(([name, n]) => `${n} ${name}`).join(", ");
  show("sandboxes", most ? `${live} of ${most}` : String(live), states || "none", most ? live / most : null);
  budget(figures.get("snapshots"), s.snapshots, s.snapshot_bytes, s.snapshot_budget_bytes);
  budget(figures.get("checkpoints"), null, s.checkpoint_bytes, s.checkpoint_budget_bytes);
  const changes = s.root_changes ? `${s.root_changes} changes of a base: new rollouts begin new trees` : "replays that met another state";
  show("diverged", short(s.divergences), changes);
  show("failed", short(failures), Object.entries(s.failures).map(([kind, n]) => `${n} ${kind}`).join(", ") || "failures of the machine");
  figures.get("diverged").element.classList.toggle("bad", s.divergences + s.root_changes > 0);
  figures.get("failed").element.classList.toggle("bad", failures > 0);
}

function budget(shown, number, used, most) {
  const what = number === null ? bytes(used) : `${short(number)}`;
  shown.show(what, number === null ? `of ${bytes(most)}` : `${bytes(used)} of ${bytes(most)}`, most ? used / most : 0);
}

const COLUMNS = [
  ["task", "Task", (t) => t.task],
  ["running", "Running", (t) => t.running],
  ["rollouts", "Rollouts", (t) => t.rollouts],
  ["calls", "Calls", (t) => t.calls],
  ["rate", "Hit rate", (t) => rate(t)],
  ["executed", "Executed", (t) => t.executed_s],
  ["saved", "Saved", (t) => t.saved_s],
  ["nodes", "Nodes", (t) => t.nodes],
  ["created", "Created", (t) => t.created_at],
];
const rate = (t) => (t.calls ? (t.hits + t.waits) / t.calls : 0);
const SHOWN = 500;

function taskTable(params, setParams) {
  let order = params.get("sort") ?? "created";
  let up = params.get("up") === "1";
  let tasks = [];
  const rows = new Map();
  const body = h("tbody");
  const note = h("span", { class: "note" });
  const search = h("input", {
    type: "search", placeholder: "Filter tasks", "aria-label": "Filter tasks", value: params.get("q") ?? "",
    on: { input: () => { setParams({ q: search.value }); draw(); } },
  });
  const heads = COLUMNS.map(([name, title]) => {
    const head = h("th", { class: name === "task" ? "" : "num", scope: "col" }, h("button", { on: { click: () => sortBy(name) } }, title));
    head.dataset.name = name;
    return head;
  });
  const sortBy = (name) => {
    up = order === name ? !up : name === "task";
    order = name;
    setParams({ sort: order === "created" ? null : order, up: up ? "1" : null });
    draw();
  };
  const draw = () => {
    const wanted = search.value.toLowerCase();
    const key = COLUMNS.find(([name]) => name === order)[2];
    const chosen = tasks.filter((t) => t.task.toLowerCase().includes(wanted));
    chosen.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.task < b.task ? -1 : 1) * (up ? 1 : -1));
    for (const head of heads) {
      if (head.dataset.name === order) head.setAttribute("aria-sort", up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const shown = chosen.slice(0, SHOWN).map((task) => {
      if (!rows.has(task.task)) rows.set(task.task, taskRow(task.task));
      return rows.get(task.task).show(task);
    });
    if (shown.length !== body.children.length || shown.some((row, i) => body.children[i] !== row)) put(body, shown);
    say(note, chosen.length > SHOWN ? `${SHOWN} of ${count(chosen.length)}` : `${count(chosen.length)}`);
    empty.hidden = tasks.length > 0;
  };
  const empty = h(
    "p", { class: "empty", hidden: true },
    "There is no task yet. Set an agent's tool base URL to ", h("code", {}, `${location.origin}/t/demo/r/1`), " and its task appears here.",
  );
  const element = h(
    "section",
    { class: "panel", "aria-labelledby": "tasks-h" },
    h("header", {}, h("h2", { id: "tasks-h" }, "Tasks"), note, h("span", { class: "gap" }), search, importButton()),
    h("div", { class: "scroll" }, h("table", { class: "tasks" }, h("thead", {}, h("tr", {}, heads)), body)),
    empty,
  );
  return { element, show: (found) => { tasks = found; draw(); } };
}

function taskRow(name) {
  const cells = COLUMNS.map(([column]) => h("td", { class: column === "task" ? "" : "num" }));
  const href = `#/t/${encodeURIComponent(name)}`;
  const row = h("tr", { class: "go", data: { task: name }, on: { click: (event) => { if (!event.target.closest("a")) location.hash = href; } } }, cells);
  put(cells[0], h("a", { href, class: "mono" }, name));
  const bar = h("span");
  const share = h("span");
  put(cells[4], h("span", { class: "rate" }, h("span", { class: "track", "aria-hidden": "true" }, bar), share));
  let calls = null;
  return {
    show(t) {
      if (calls !== null && calls !== t.calls) flash(row);
      calls = t.calls;
      say(cells[1], t.running ? count(t.running) : "–");
      say(cells[2], count(t.rollouts));
      say(cells[3], count(t.calls));
      bar.style.width = `${rate(t) * 100}%`;
      say(share, t.calls ? percent(rate(t)) : "–");
      say(cells[5], seconds(t.executed_s));
      say(cells[6], seconds(t.saved_s));
      say(cells[7], count(t.nodes));
      say(cells[8], ago(t.created_at));
      return row;
    },
  };
}

