// The difference between two states: files, shell sessions and databases.

import { get, names } from "./api.js";
import { h, panel, put, showPanels } from "./dom.js";
import { bytes, count, plural, visible } from "./format.js";
import { sideBySide } from "./sides.js";
import { languageOf } from "./syntax.js";

const KEY = "forkpoint-diff";

export async function diffView({ main, signal }, task, a, b) {
  const link = (node) => h("a", { class: "mono", href: `#/t/${names(task)}?node=${node}` }, node);
  const body = h("div", { class: "body" }, h("p", { class: "dim" }, "Comparing two scratch forks …"));
  showPanels(main, panel({}, h("h1", {}, "What changed from ", link(a), " to ", link(b)), body));
  put(body, changes(await get(`tasks/${names(task)}/nodes/${a}/diff/${b}`, { signal })));
}

/** Return a response of `…/diff/…` as elements, side by side or unified as the user chose. */
export function changes(view) {
  if (view.same) return h("p", { class: "dim" }, "Nothing changed: both nodes have the same state.");
  const stage = h("div", { class: "stack" });
  const modes = ["Side by side", "Unified"].map((text, i) => h("button", { on: { click: () => { localStorage.setItem(KEY, i ? "unified" : "sides"); draw(); } } }, text));
  const draw = () => {
    // Two columns of code do not fit a phone.
    const sides = (localStorage.getItem(KEY) ?? (window.innerWidth < 640 ? "unified" : "sides")) === "sides";
    modes.forEach((mode, i) => mode.setAttribute("aria-pressed", String(sides === (i === 0))));
    put(stage, parts(view, sides));
  };
  draw();
  return h("div", { class: "stack" }, view.files?.some((file) => file.diff) ? h("div", { class: "group", role: "group", "aria-label": "Show differences" }, modes) : null, stage);
}

function parts(view, sides) {
  const found = [files(view, sides), (view.sessions ?? []).map(session), (view.databases ?? []).map(database)].flat(Infinity).filter(Boolean);
  const notes = view.unshown.map((text) => h("p", { class: "faint" }, text));
  return h("div", { class: "stack changes" }, found.length ? found : h("p", { class: "dim" }, "No difference can be shown."), notes);
}

function files(view, sides) {
  if (!view.files?.length) return null;
  const sign = { added: "+", removed: "−", changed: "±" };
  return [
    h("h3", {}, view.files_total > view.files.length ? `Files: ${view.files.length} of ${count(view.files_total)}` : plural(view.files.length, "file")),
    view.files.map((file) =>
      h(
        "details",
        { open: view.files.length <= 4 },
        h("summary", { class: "mono" }, `${sign[file.change]} ${visible(file.path)} `, h("span", { class: "faint" }, facts(file))),
        file.diff ? (sides ? sideBySide(file.diff, languageOf(file.path)) : unified(file.diff)) : h("p", { class: "faint" }, file.unshown || attributes(file)),
      ),
    ),
  ];
}

function facts({ before, after }) {
  const now = after ?? before;
  return now.kind === "file" ? bytes(now.size_bytes) : now.kind === "symlink" ? `→ ${visible(now.target ?? "")}` : now.kind;
}

function attributes({ before, after }) {
  if (!before || !after) return "";
  return ["kind", "mode", "uid", "gid", "size_bytes", "target"].filter((name) => before[name] !== after[name]).map((name) => `${name} ${before[name]} → ${after[name]}`).join(", ");
}

/** Return a unified diff with coloured lines. */
export function unified(text) {
  const kind = (row) => (row.startsWith("@@") ? "at" : row.startsWith("+") ? "add" : row.startsWith("-") ? "del" : "");
  return h("pre", { class: "output diff", tabindex: "0" }, text.replace(/\n$/, "").split("\n").map((row) => h("span", { class: kind(row) }, `${visible(row)}\n`)));
}

function session(change) {
  const rows = [change.cwd, ...change.variables, ...change.functions].filter(Boolean);
  return [
    h("h3", {}, `Session ${change.session}`),
    h("dl", { class: "kv mono" }, rows.map((row) => [h("dt", {}, visible(row.name)), h("dd", { class: "diff" }, row.before === null ? null : h("span", { class: "del" }, visible(row.before)), row.before !== null && row.after !== null ? " → " : "", row.after === null ? null : h("span", { class: "add" }, visible(row.after)))])),
  ];
}

function database(change) {
  return [
    h("h3", {}, `Database ${change.database}`),
    change.tables.map((table) => [
      h("p", { class: "mono" }, `${visible(table.table)} `, h("span", { class: "faint" }, `${table.before_rows ?? "?"} → ${table.after_rows ?? "?"} rows ${table.unshown}`)),
      table.schema_ ?? table.schema ? unified([(table.schema_ ?? table.schema).before && `-${(table.schema_ ?? table.schema).before}`, (table.schema_ ?? table.schema).after && `+${(table.schema_ ?? table.schema).after}`].filter(Boolean).join("\n")) : null,
      table.removed.length + table.added.length ? unified([...table.removed.map((row) => `- ${JSON.stringify(row)}`), ...table.added.map((row) => `+ ${JSON.stringify(row)}`)].join("\n")) : null,
    ]),
    change.unshown ? h("p", { class: "faint" }, change.unshown) : null,
  ];
}
