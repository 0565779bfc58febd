// A unified diff side by side: what was removed at the left, what was added at the right, with the numbers of the lines.

import { h } from "./dom.js";
import { coloured } from "./syntax.js";

/** Return the rows of a unified diff: `[left, right]`, each `[number, text]` or null; or `[heading]` for a hunk. */
export function rowsOf(text) {
  const rows = [];
  let [left, right] = [0, 0];
  let [gone, come] = [[], []];
  const pair = () => {
    for (let i = 0; i < Math.max(gone.length, come.length); i++) rows.push([gone[i] ?? null, come[i] ?? null]);
    [gone, come] = [[], []];
  };
  for (const line of text.replace(/\n$/, "").split("\n")) {
    const hunk = /^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@/.exec(line);
    if (hunk) {
      pair();
      [left, right] = [Number(hunk[1]), Number(hunk[2])];
      rows.push([line]);
    } else if (left === 0 && right === 0 && /^(---|\+\+\+) /.test(line)) continue;
    else if (line.startsWith("-")) gone.push([left++, line.slice(1)]);
    else if (line.startsWith("+")) come.push([right++, line.slice(1)]);
    else if (line.startsWith("\\")) continue;
    else {
      pair();
      rows.push([[left++, line.slice(1)], [right++, line.slice(1)]]);
    }
  }
  pair();
  return rows;
}

/** Return a unified diff as a table with two sides. */
export function sideBySide(text, language) {
  const side = (cell, kind) => [
    h("td", { class: "line" }, cell && cell[0] > 0 ? String(cell[0]) : ""),
    h("td", { class: cell ? kind : "none" }, cell ? coloured(cell[1], language) : ""),
  ];
  return h(
    "div", { class: "scroll two-sides", tabindex: "0" },
    h("table", {}, h("colgroup", {}, ["line", "", "line", ""].map((kind) => h("col", { class: kind }))), h("tbody", {}, rowsOf(text).map(([a, b]) =>
      b === undefined ? h("tr", {}, h("td", { colspan: 4, class: "at" }, a)) : h("tr", {}, side(a, a && b && a[1] === b[1] ? "" : "del"), side(b, a && b && a[1] === b[1] ? "" : "add"))))),
  );
}
