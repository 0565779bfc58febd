// Shows an answer by its type: terminal output, table, image or JSON. Answers are never rendered as markup.

import { ask } from "./api.js";
import { h, put } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { terminalText } from "./ansi.js";

const FIRST = 20_000;
const MORE = 100_000;
const ROWS = 200;

/** Return an answer as an element. path: the API path of its bytes. */
export function answer(shown, path, signal) {
  const views = viewsOf(shown, path, signal);
  const stage = h("div", { class: "stack" });
  const tabs = views.map(([name, make], i) => h("button", { role: "tab", "aria-selected": "false", on: { click: () => choose(i) }, data: { make: name } }, name));
  const choose = (at) => {
    tabs.forEach((tab, i) => tab.setAttribute("aria-selected", String(i === at)));
    put(stage, views[at][1]());
  };
  choose(0);
  const notes = [
    shown.media_type, bytes(shown.size_bytes), shown.status !== 200 && `status ${shown.status}`,
    shown.truncated && "cut: download the whole answer", !shown.exact && "not UTF-8: � replaces unreadable bytes",
  ].filter(Boolean);
  return h("div", { class: "stack answer" }, tabs.length > 1 ? h("div", { class: "group", role: "tablist", "aria-label": "Show as" }, tabs) : null, stage, h("p", { class: "faint" }, notes.join(" · ")));
}

function viewsOf(shown, path, signal) {
  const kind = shown.media_type.split(";")[0].trim().toLowerCase();
  const views = [];
  if (/^image\/(png|jpeg|gif|webp|avif|bmp)$/.test(kind)) views.push(["Image", () => picture(path, kind, signal)]);
  const value = shown.json;
  if (value !== undefined && value !== null) {
    if (typeof value.stdout === "string") views.push(["Output", () => shell(value)]);
    if (Array.isArray(value.columns) && Array.isArray(value.rows)) views.push(["Table", () => table(value.columns, value.rows, value)]);
    else if (isRecords(value)) views.push(["Table", () => records(value)]);
    if (isContent(value)) views.push(["Content", () => content(value.content ?? value.result.content)]);
    views.push(["JSON", () => json(value)]);
  } else if (kind.endsWith("json") && shown.text === null) views.push(["JSON", () => json(value)]);
  if (typeof shown.text === "string") views.push(["Text", () => text(shown.text)]);
  return views.length ? views : [["Bytes", () => h("p", { class: "dim" }, `${bytes(shown.size_bytes)} of ${shown.media_type}. Download them to see them.`)]];
}

function shell(value) {
  const parts = [];
  if (value.stdout) parts.push(text(value.stdout));
  if (value.stderr) parts.push(h("h3", {}, "stderr"), text(value.stderr));
  if (!parts.length) parts.push(h("p", { class: "dim" }, "No output."));
  const ends = [value.exit_code !== undefined && value.exit_code !== 0 && `exit code ${value.exit_code}`, value.timed_out && "timed out", value.truncated && "cut at the task's output limit"].filter(Boolean);
  if (ends.length) parts.push(h("div", { class: "chips" }, ends.map((end) => h("span", { class: "chip bad" }, end))));
  return parts;
}

/** Return text as an element that shows its beginning first: megabytes in one line would block the page. */
export function text(whole) {
  const block = h("pre", { class: "output", tabindex: "0" });
  const more = h("button", { class: "quiet", on: { click: () => grow() } });
  let shown = FIRST;
  const draw = () => {
    // Do not cut between the two halves of a surrogate pair.
    const end = /[\ud800-\udbff]/.test(whole[shown - 1] ?? "") ? shown + 1 : shown;
    put(block, terminalText(whole.slice(0, end)));
    more.hidden = whole.length <= shown;
    more.textContent = `Show more (${count(whole.length - shown)} characters are hidden)`;
  };
  const grow = () => {
    shown += MORE;
    draw();
  };
  draw();
  return h("div", { class: "stack" }, block, more);
}

export function json(value) {
  const whole = JSON.stringify(value, null, 2) ?? "null";
  if (whole.length > FIRST) return text(whole);
  const pieces = [];
  let from = 0;
  for (const match of whole.matchAll(/("(?:[^"\\]|\\.)*")(\s*:)?|\b(?:true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g)) {
    pieces.push(whole.slice(from, match.index));
    const kind = match[1] ? (match[2] ? "k" : "s") : /[tfn]/.test(match[0][0]) ? "l" : "n";
    pieces.push(h("span", { class: kind }, terminalText(match[1] ?? match[0])), match[2] ?? "");
    from = match.index + match[0].length;
  }
  pieces.push(whole.slice(from));
  // Colours are ours here; what controls a display is escaped in JSON, but for what turns its direction.
  return h("pre", { class: "output json", tabindex: "0" }, pieces.map((piece) => (typeof piece === "string" ? terminalText(piece) : piece)));
}

function table(columns, rows, result) {
  const shown = rows.slice(0, ROWS);
  const cells = (row) => (Array.isArray(row) ? row : columns.map((name) => row?.[name]));
  return [
    result.error ? h("div", { class: "chips" }, h("span", { class: "chip bad" }, typeof result.error === "string" ? result.error : (result.error.message ?? JSON.stringify(result.error)))) : null,
    h("div", { class: "scroll bytable", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, String(typeof name === "object" && name ? (name.name ?? JSON.stringify(name)) : name))))), h("tbody", {}, shown.map((row) => h("tr", {}, cells(row).map(tableCell)))))),
    h("p", { class: "faint" }, rows.length > ROWS ? `${ROWS} of ${plural(rows.length, "row")}` : plural(result.row_count ?? rows.length, "row")),
  ];
}

const tableCell = (value) => (value === null || value === undefined ? h("td", {}, h("span", { class: "null" }, "null")) : h("td", { title: String(value).slice(0, 400) }, terminalText(typeof value === "object" ? JSON.stringify(value) : String(value).slice(0, 2000))));

const isRecords = (value) => Array.isArray(value) && value.length > 0 && value.every((row) => row && typeof row === "object" && !Array.isArray(row));

function records(value) {
  const columns = [...new Set(value.slice(0, ROWS).flatMap((row) => Object.keys(row)))].slice(0, 50);
  return table(columns, value, {});
}

const contentOf = (value) => value?.content ?? value?.result?.content;
const isContent = (value) => Array.isArray(contentOf(value)) && contentOf(value).every((part) => part && typeof part.type === "string");

/** What MCP calls content: texts and pictures. */
function content(parts) {
  return parts.map((part) => {
    if (part.type === "text") return text(String(part.text ?? ""));
    const known = /^image\/(png|jpeg|gif|webp|avif)$/.test(part.mimeType ?? "");
    if (part.type === "image" && known && /^[A-Za-z0-9+/=]*$/.test(part.data ?? "")) return h("img", { class: "picture", alt: "picture in the answer", src: `data:${part.mimeType};base64,${part.data}` });
    return json(part);
  });
}

/** A picture comes as bytes, and is made one here by a type that is one: it cannot be a page. */
function picture(path, kind, signal) {
  const image = h("img", { class: "picture", alt: "picture that the tool answered" });
  ask("GET", path, { signal })
    .then((response) => response.arrayBuffer())
    .then((data) => {
      const url = URL.createObjectURL(new Blob([data], { type: kind }));
      image.src = url;
      signal.addEventListener("abort", () => URL.revokeObjectURL(url));
    })
    .catch(() => image.replaceWith(h("p", { class: "dim" }, "The picture could not be fetched.")));
  return image;
}
