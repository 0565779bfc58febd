// The table of tasks: filter, order, pages and families.

import { importButton } from "./carry.js";
import { grid, h, panel, put, say } from "./dom.js";
import { ago, count, percent, seconds } from "./format.js";
import { flash } from "./live.js";

const COLUMNS = [
  ["task", "Task", (t) => t.task],
  ["running", "Running", (t) => t.running],
  ["rollouts", "Rollouts", (t) => t.rollouts],
  ["calls", "Calls", (t) => t.calls],
  ["rate", "Hit rate", (t) => rate(t)],
  ["executed", "Executed", (t) => t.executed_s],
  ["saved", "Saved", (t) => t.saved_s],
  ["nodes", "Nodes", (t) => t.nodes],
  ["used", "Last call", (t) => t.used_at ?? ""],
  ["created", "Created", (t) => t.created_at],
];
const rate = (t) => (t.calls ? (t.hits + t.waits) / t.calls : 0);
const PAGE = 100;

/** Return the family of a task: its name without the numbers at its end, such as `django` of `django-0042`. */
const familyOf = (name) => name.replace(/[-_./]?\d+$/, "") || name;

/** Return families of at least two tasks as sums; a task without relatives stays as it is. */
export function families(tasks) {
  const groups = new Map();
  for (const task of tasks) {
    const family = familyOf(task.task);
    if (!groups.has(family)) groups.set(family, []);
    groups.get(family).push(task);
  }
  return [...groups].map(([family, members]) => {
    if (members.length === 1) return members[0];
    const sum = (name) => members.reduce((total, task) => total + task[name], 0);
    const sums = Object.fromEntries(["running", "rollouts", "calls", "hits", "waits", "executed_s", "saved_s", "nodes"].map((name) => [name, sum(name)]));
    return { ...sums, task: family, family: members.length, used_at: members.map((task) => task.used_at ?? "").sort().at(-1), created_at: members.map((task) => task.created_at).sort()[0] };
  });
}

/** The table of tasks. setParams: writes filter, order, page and families into the address. */
export function taskTable(params, setParams) {
  let order = params.get("sort") ?? "created";
  let up = params.get("up") === "1";
  let tasks = [];
  let page = Math.max(0, Number(params.get("page")) - 1 || 0);
  let grouped = params.get("families") === "1";
  const rows = new Map();
  const body = h("tbody");
  const note = h("span", { class: "note" });
  const search = h("input", {
    type: "search", placeholder: "Filter tasks", "aria-label": "Filter tasks", value: params.get("q") ?? "",
    on: { input: () => { page = 0; setParams({ q: search.value, page: null }); draw(); } },
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
    const matching = tasks.filter((t) => t.task.toLowerCase().includes(wanted));
    const chosen = grouped ? families(matching) : matching;
    chosen.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.task < b.task ? -1 : 1) * (up ? 1 : -1));
    for (const head of heads) {
      if (head.dataset.name === order) head.setAttribute("aria-sort", up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const pages = Math.max(1, Math.ceil(chosen.length / PAGE));
    page = Math.min(page, pages - 1);
    const shown = chosen.slice(page * PAGE, (page + 1) * PAGE).map((task) => {
      const key = `${task.family ?? ""} ${task.task}`;
      if (!rows.has(key)) rows.set(key, taskRow(task, (family) => open(family)));
      return rows.get(key).show(task);
    });
    pager.hidden = pages < 2;
    before.disabled = page === 0;
    after.disabled = page === pages - 1;
    say(where, `page ${page + 1} of ${pages}`);
    family.setAttribute("aria-pressed", String(grouped));

    if (shown.length !== body.children.length || shown.some((row, i) => body.children[i] !== row)) put(body, shown);
    say(note, count(chosen.length));
    empty.hidden = tasks.length > 0;
  };
  const turn = (step) => {
    page += step;
    setParams({ page: page ? String(page + 1) : null });
    draw();
  };
  const open = (name) => {
    grouped = false;
    page = 0;
    search.value = name;
    setParams({ q: name, families: null, page: null });
    draw();
  };
  const where = h("span", { class: "dim" });
  const before = h("button", { on: { click: () => turn(-1) } }, "Previous");
  const after = h("button", { on: { click: () => turn(1) } }, "Next");
  const pager = h("div", { class: "body split pager", hidden: true }, before, where, after);
  const family = h("button", { title: "Sum up tasks whose names differ in a number at their end", on: { click: () => { grouped = !grouped; page = 0; setParams({ families: grouped ? "1" : null, page: null }); draw(); } } }, "Families");
  const empty = h(
    "p", { class: "empty", hidden: true },
    "There is no task yet. Set an agent's tool base URL to ", h("code", {}, `${location.origin}/t/demo/r/1`), " and its task appears here.",
  );
  const element = panel(
    { "aria-labelledby": "tasks-h" },
    [h("h2", { id: "tasks-h" }, "Tasks"), note, h("span", { class: "gap" }), search, family, importButton()],
    grid({ class: "tasks" }, h("thead", {}, h("tr", {}, heads)), body),
    pager,
    empty,
  );
  return { element, show: (found) => { tasks = found; draw(); } };
}

function taskRow({ task: name, family }, openFamily) {
  const cells = COLUMNS.map(([column]) => h("td", { class: column === "task" ? "" : "num" }));
  const href = `#/t/${encodeURIComponent(name)}`;
  const act = () => (family ? openFamily(name) : (location.hash = href));
  const row = h("tr", { class: "go", data: { task: name }, on: { click: (event) => { if (!event.target.closest("a, button")) act(); } } }, cells);
  put(cells[0], family ? [h("button", { class: "call mono", on: { click: act } }, `${name}…`), h("span", { class: "chip" }, `${family} tasks`)] : h("a", { href, class: "mono" }, name));
  const rollouts = family ? cells[2] : h("a", { href: `${href}/rollouts`, title: `Rollouts of ${name}` });
  if (!family) put(cells[2], rollouts);
  const bar = h("span");
  const share = h("span");
  put(cells[4], h("span", { class: "rate" }, h("span", { class: "track", "aria-hidden": "true" }, bar), share));
  let calls = null;
  return {
    show(t) {
      if (calls !== null && calls !== t.calls) flash(row);
      calls = t.calls;
      say(cells[1], t.running ? count(t.running) : "–");
      say(rollouts, count(t.rollouts));
      say(cells[3], count(t.calls));
      bar.style.width = `${rate(t) * 100}%`;
      say(share, t.calls ? percent(rate(t)) : "–");
      say(cells[5], seconds(t.executed_s));
      say(cells[6], seconds(t.saved_s));
      say(cells[7], count(t.nodes));
      say(cells[8], t.used_at ? ago(t.used_at) : "–");
      say(cells[9], ago(t.created_at));
      return row;
    },
  };
}
