// The keys, and what the marks mean.

import { h } from "./dom.js";

const KEYS = [
  [["/"], "search, or filter the list"],
  [["o"], "overview"],
  [["t"], "tree of this task"],
  [["↑", "↓"], "next or previous call that the tree shows"],
  [["←", "→"], "towards the root; into the tree. In the table: close or open"],
  [["Enter"], "show the node, or unfold a chain"],
  [["Space"], "collapse or expand what lies below"],
  [["Home", "End"], "root; last row"],
  [["+", "−", "0"], "zoom in, zoom out, show all"],
  [["m"], "map or table"],
  [["Esc"], "close what is open"],
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
      h("div", { class: "row" }, close),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
