// The command palette: views, tasks, rollouts and actions, found by typing. Ctrl-K or Cmd-K opens it.

import { items, names } from "./api.js";
import { h, put } from "./dom.js";

const SHOWN = 40;
const LISTED = 1000;
const WAIT_MS = 120;

/** Open the palette. task: the task in the address, or null. commands: pairs of words and what to do. */
export function palette(task, commands) {
  if (document.querySelector("dialog.palette")) return;
  let entries = commands.map(([text, run]) => ({ text, kind: "", run }));
  let shown = [];
  let at = 0;
  const input = h("input", { type: "search", role: "combobox", "aria-expanded": "true", "aria-controls": "palette-list", "aria-label": "Find a view, a task, a rollout or an action", placeholder: "Find a view, a task, a rollout or an action", autocomplete: "off" });
  const list = h("ul", { class: "finds open", id: "palette-list", role: "listbox", "aria-label": "Found" });
  const dialog = h("dialog", { class: "palette wide", "aria-label": "Command palette" }, input, list);
  const go = (entry) => {
    dialog.close();
    entry?.run();
  };
  const draw = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = entries.filter((entry) => words.every((word) => entry.text.toLowerCase().includes(word))).slice(0, SHOWN);
    at = Math.min(at, Math.max(0, shown.length - 1));
    put(list, shown.length
      ? shown.map((entry, i) => h("li", { role: "option", id: `palette-${i}`, "aria-selected": String(i === at), on: { click: () => go(entry) } }, h("span", { class: entry.kind ? "mono" : "" }, entry.text), h("span", { class: "faint" }, entry.kind)))
      : h("li", { class: "none", role: "option", "aria-selected": "false" }, "Nothing has this name."));
    input.setAttribute("aria-activedescendant", shown.length ? `palette-${at}` : "");
    list.children[at]?.scrollIntoView({ block: "nearest" });
  };
  input.addEventListener("input", () => { at = 0; draw(); });
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && shown.length) at = (at + step + shown.length) % shown.length;
    else if (event.key === "Enter") go(shown[at]);
    else return;
    event.preventDefault();
    draw();
  });
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  dialog.showModal();
  draw();
  setTimeout(async () => {
    const add = (path, of) => items(path, { most: LISTED }).then((found) => { entries = [...entries, ...found.map(of)]; if (dialog.open) draw(); }, () => {});
    const to = (address) => () => (location.hash = address);
    if (task) await add(`tasks/${names(task)}/rollouts?sort=-created_at`, (r) => ({ text: r.rollout, kind: "rollout", run: to(`#/t/${names(task)}/r/${names(r.rollout)}`) }));
    await add("tasks", (t) => ({ text: t.task, kind: "task", run: to(`#/t/${names(t.task)}`) }));
  }, WAIT_MS);
}
