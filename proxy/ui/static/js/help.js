// The list of keyboard shortcuts, with links to the manual and to the REST API.

import { h } from "./dom.js";

const KEYS = [
  [["/"], "search, or filter the list"],
  [["Ctrl-K"], "find a view, a task, a rollout or an action"],
  [["j", "k"], "next or previous row of a table"],
  [["g", "o"], "overview; g r runs, g s sandboxes, g n snapshots, g y system, g t tree, g l rollouts"],
  [["o"], "overview"],
  [["t"], "tree of this task"],
  [["↑", "↓"], "next or previous visible call"],
  [["←", "→"], "to the parent; to the child. In the table: collapse or expand"],
  [["Enter"], "show the node, or unfold a chain"],
  [["Space"], "collapse or expand the subtree"],
  [["Home", "End"], "root; last row"],
  [["+", "−", "0"], "zoom in, zoom out, show all"],
  [["m"], "map or table"],
  [["p"], "pause or resume live updates"],
  [["Esc"], "close the open panel or dialog"],
  [["?"], "this list"],
];

export function help() {
  const close = h("button", { class: "primary", on: { click: () => dialog.close() } }, "Close");
  const dialog = h(
    "dialog",
    { class: "wide", "aria-label": "Keys" },
    h(
      "form",
      { method: "dialog" },
      h("h2", {}, "Keys"),
      h("dl", { class: "keys" }, KEYS.map(([keys, what]) => [h("dt", {}, keys.map((key) => [h("kbd", {}, key), " "])), h("dd", {}, what)])),
      h("p", {}, "More: ", h("a", { href: "../manual/" }, "the manual"), ", ", h("a", { href: "../docs" }, "the REST API"), "."),
      h("div", { class: "row" }, close),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
