// Search by the text of calls: a list below the field, and marks in the map.

import { get, names } from "../api.js";
import { h, put } from "../dom.js";
import { count, oneLine, plural, seconds } from "../format.js";

/** The search field, which searches the tree that is shown. */
export function finder(task, signal, { tree, choose, found, list: showAll, query, setQuery }) {
  let at = -1;
  let hits = [];
  let timer = 0;
  let asked = 0;
  const list = h("ul", { class: "finds", role: "listbox", id: "finds", hidden: true, "aria-label": "Matching calls" });
  const input = h("input", {
    type: "search", placeholder: "Search calls", "aria-label": "Search calls", value: query, role: "combobox", "aria-expanded": "false", "aria-controls": "finds", autocomplete: "off",
    on: {
      input: () => { clearTimeout(timer); timer = setTimeout(look, 120); },
      focus: () => { if (hits.length) open(true); },
      blur: () => setTimeout(() => open(false), 150),
      keydown: (event) => key(event),
    },
  });

  function open(shown) {
    list.hidden = !shown;
    input.setAttribute("aria-expanded", String(shown));
  }

  async function look() {
    const text = input.value.trim();
    setQuery(text);
    const mine = ++asked;
    if (!text) {
      hits = [];
      found([]);
      open(false);
      return;
    }
    const view = await get(`tasks/${names(task)}/search?q=${encodeURIComponent(text)}&limit=200&root=${tree()}`, { signal }).catch((error) => ({ items: [], error }));
    if (mine !== asked) return;
    hits = view.items;
    at = hits.length ? 0 : -1;
    found(hits.map((hit) => Number(hit.node.slice(1))));
    draw(view);
    if (document.activeElement === input) open(true);
  }

  function draw(view) {
    put(
      list,
      hits.map((hit, i) =>
        h("li", { role: "option", id: `find-${i}`, "aria-selected": String(i === at), on: { mousedown: (event) => { event.preventDefault(); pick(i); } } }, h("span", { class: "mono" }, oneLine(hit.title)), h("span", { class: "faint" }, `${hit.node}${hit.observation ? " read" : ""} · ${plural(hit.hits, "hit")}`)),
      ),
      hits.length > 1 ? h("li", { class: "all", id: `find-${hits.length}`, role: "option", "aria-selected": "false", on: { mousedown: (event) => { event.preventDefault(); open(false); showAll(hits); } } }, `Show all ${hits.length} as a list`) : null,
      hits.length === 0 ? h("li", { class: "none" }, view?.error ? view.error.message : "No call contains this text.") : view?.next ? h("li", { class: "none" }, "There are more matches: search for a longer text.") : null,
    );
  }

  function pick(i) {
    open(false);
    if (i === hits.length) showAll(hits);
    else choose(Number(hits[i].node.slice(1)));
  }

  function key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && hits.length) {
      const rows = hits.length > 1 ? hits.length + 1 : hits.length;
      at = (at + step + rows) % rows;
      [...list.children].forEach((li, i) => li.setAttribute?.("aria-selected", String(i === at)));
      list.children[at].scrollIntoView({ block: "nearest" });
      input.setAttribute("aria-activedescendant", `find-${at}`);
    } else if (event.key === "Enter" && at >= 0) pick(at);
    else if (event.key === "Escape") {
      input.value = "";
      look();
      input.blur();
    } else return;
    event.preventDefault();
  }

  return { element: h("div", { class: "finder" }, input, list), look };
}

/** Show matches as a list that stays. choose: called with the number of a node. */
export function results(element, hits, choose) {
  put(
    element,
    h("div", { class: "node-head" }, h("div", { class: "title" }, h("h2", { class: "words" }, "Matching calls"), h("span", { class: "dim" }, count(hits.length)))),
    h("section", { class: "part" }, h("ul", { class: "list results" }, hits.map((hit) =>
      h("li", {}, h("button", { class: "row", title: oneLine(hit.title), on: { click: () => choose(Number(hit.node.slice(1))) } }, oneLine(hit.title)), h("span", { class: "faint" }, [hit.node, hit.observation ? "read" : "", hit.seconds === undefined ? "" : seconds(hit.seconds), plural(hit.hits, "hit")].filter(Boolean).join(" · ")))))),
  );
}
