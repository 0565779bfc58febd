// The tree of a task: loaded in parts, shown as a map or a table, updated live, with the chosen node beside it.

import { get, names } from "./api.js";
import { h, icon, put, say, toast } from "./dom.js";
import { count, oneLine, plural, seconds, short } from "./format.js";
import { watch } from "./live.js";
import { nodePanel } from "./node.js";
import { exportLink } from "./carry.js";
import { finder } from "./tree/finder.js";
import { legend } from "./tree/legend.js";
import { Model } from "./tree/model.js";
import { TreeMap } from "./tree/canvas.js";
import { TreeTable, marksOf } from "./tree/table.js";
import { TreeChoice, Which } from "./trees.js";

const MOST = 300_000;
const LABELS_AT_ONCE = 200;
const TREES_MS = 5000;

export async function treeView(context, task) {
  const view = new TreeView(context, task);
  await view.open();
  return view;
}

/** The map, or on a narrow window, where the map has no room for calls, the table. */
const usualMode = () => (window.innerWidth < 640 ? "table" : "map");
const modeOf = (params) => ({ table: "table", map: "map" })[params.get("view")] ?? usualMode();

class TreeView {
  constructor({ main, params, signal, setParams }, task) {
    Object.assign(this, { main, signal, setParams, task });
    this.path = `tasks/${names(task)}`;
    this.model = new Model();
    this.texts = new Map();
    this.wanted = new Set();
    this.failuresUpto = 0;
    this.params = params;
    this.focused = 0;
    this.loads = 0;
    this.which = new Which(task, params, signal);
    this.panel = new AbortController();
    signal.addEventListener("abort", () => this.panel.abort());
  }

  async open() {
    performance.mark("tree-open");
    this._frame();
    await this._load(this.which.first(this.params), true);
    this._choose(this.params.get("node"), true);
    performance.mark("tree-ready");
    this.main.dataset.ready = "1";
    this._failures();
    this.which.listing.then(() => this._name());
    if (this.params.get("q")) this.finder.look();
    watch(() => this._news(), this.signal);
  }

  /** React to a change of the address's query: another node, tree or mode. */
  async update(params) {
    this.params = params;
    this._mode(modeOf(params));
    const node = params.get("node");
    const root = params.get("root") ?? this.which.usual;
    const elsewhere = node ? !this.model.index.has(Number(node.slice(1))) : root !== this.which.root;
    if (elsewhere) await this._show(node ?? root).catch(() => {});
    this.which.fixed = Boolean(node ?? params.get("root"));
    this._choose(node, false);
  }

  /** Show the tree that has a node. */
  async _show(node) {
    this.which.fixed = true;
    await this._load(this.which.part(0, node), true);
    this._choose(null, false);
    this._failures();
    this.finder.look();
  }

  _frame() {
    const { params, signal } = this;
    const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": `Map of the tree of ${this.task}. Press m for an accessible table.`, on: { keydown: (event) => this._key(event) } });
    this.stage = h("div", { class: "stage" }, canvas);
    this.side = h("aside", { class: "side", "aria-label": "Chosen call", hidden: true });
    this.counts = h("span", { class: "counts" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.main.className = "tree";
    this.modes = ["map", "table"].map((mode) => h("button", { on: { click: () => { this._mode(mode); this.setParams({ view: mode === usualMode() ? null : mode }); } } }, mode === "map" ? "Map" : "Table"));
    this.choice = new TreeChoice((root) => {
      this.setParams({ node: null, at: null });
      this.params.delete("at");
      this._show(root).catch((error) => toast(error.message, true));
    });
    this.saving = h("span");
    this.finder = finder(this.task, signal, { tree: () => this.which.root, choose: (node) => this._go(node), found: (ids) => this._found(ids), query: params.get("q") ?? "", setQuery: (q) => this.setParams({ q }) });
    put(
      this.main,
      h("h1", { class: "sr" }, `Tree of ${this.task}`),
      h("div", { class: "tools" }, this.finder.element, h("div", { class: "group", role: "group", "aria-label": "View" }, this.modes), this._select("size", "Size", ["saved", "hits", "seconds", "observations"]), this._select("colour", "Colour", ["hits", "saved", "seconds", "effect"]), h("button", { class: "fold", "aria-pressed": "true", on: { click: () => this._fold() } }, "Fold chains"), this.choice.element, h("span", { class: "gap" }), this.counts, this.saving),
      h("div", { class: "field-row" }, this.stage, this.side),
    );
    this.map = new TreeMap(
      canvas, this.model,
      { choose: (item) => this._chooseItem(item), labels: (nodes) => this._want(nodes), moved: () => this._moved(), hover: (item, at) => this._hover(item, at) },
      signal,
    );
    this.map.texts = this.texts;
    this.map.size = params.get("size") ?? "saved";
    this.map.colour = params.get("colour") ?? "hits";
    this.table = new TreeTable(this.model, this.texts, { choose: (item) => this._chooseItem(item), focus: (item) => this._focus(item), toggle: (item) => this._toggle(item), labels: (nodes) => this._want(nodes) });
    this.stage.append(this._zoom(), legend(), this.tip, this.table.grid);
    this._mode(modeOf(params));
    window.addEventListener("keydown", (event) => this._anywhere(event), { signal });
  }

  _select(name, title, choices) {
    const select = h("select", { on: { change: () => { this.map[name] = select.value; this.setParams({ [name]: select.value === choices[0] ? null : select.value }); this.map.changed(); } } }, choices.map((choice) => h("option", { value: choice }, { saved: "seconds saved", hits: "hits", seconds: "seconds", observations: "reads", effect: "effect" }[choice])));
    select.value = this.params.get(name) ?? choices[0];
    return h("label", { class: "inline for-map" }, title, select);
  }

  _zoom() {
    const button = (text, title, act) => h("button", { class: "icon", title, "aria-label": title, on: { click: act } }, text);
    return h("div", { class: "zoom" }, button("+", "Zoom in", () => this.map.zoom(1.5)), button("−", "Zoom out", () => this.map.zoom(1 / 1.5)), button(icon("fit"), "Show all", () => this.map.fit()));
  }

  _mode(mode) {
    this.mode = mode;
    this.modes.forEach((button, i) => button.setAttribute("aria-pressed", String((i === 0) === (mode === "map"))));
    this.main.dataset.mode = mode;
    this.table.grid.hidden = mode === "map";
    if (mode === "table") this.table.changed();
  }

  /** Load a tree, beginning with its first part. anew: reset position and zoom. */
  async _load(coming, anew) {
    const mine = ++this.loads;
    let view = await coming;
    if (mine !== this.loads) return;
    this.loading = true;
    try {
      this._begin(view);
      if (anew) this.focused = 0;
      for (;;) {
        // Load the next part while this part is processed.
        coming = view.more ? this.which.part(view.columns.id.at(-1)) : null;
        this.model.append(view.columns, view.meets);
        if (anew) {
          this._lay(view);
          this.map.begin();
          this._restoreView();
          anew = false;
          performance.mark("tree-first");
        }
        if (!view.more || this.model.size >= MOST) break;
        view = await coming;
        if (mine !== this.loads) return;
      }
    } finally {
      if (mine === this.loads) this.loading = false;
    }
    if (view.more) toast(`Only the first ${count(this.model.size)} calls are shown.`);
    this._lay(view);
  }

  _begin(view) {
    this.which.root = `n${view.root}`;
    Object.assign(this.model, new Model());
    this.texts.clear();
    this.wanted.clear();
    this.failuresUpto = 0;
    this.chosen = undefined;
    this.map.found = new Set();
    put(this.saving, exportLink(this.task, this.which.root));
    this._name();
  }

  /** Update the select box, and the address unless it is the default tree. */
  _name() {
    const { trees, root, usual } = this.which;
    if (!trees) return;
    this.choice.show(trees, root);
    this.setParams({ root: root === usual ? null : root });
  }

  _lay(view) {
    const selected = this.model.items ? this.model.items.node[this.focused] : 0;
    if (view) {
      this.model.stand(view);
      this.nodes = view.nodes;
    }
    this.model.layout();
    this.focused = Math.max(0, this.model.itemOf[selected] ?? 0);
    this.map.selected = this.chosen === undefined ? -1 : this.model.itemOf[this.chosen];
    this.map.changed();
    this.table.selected = this.focused;
    if (this.mode === "table") this.table.changed();
    this._say();
  }

  _say() {
    const { model } = this;
    let standing = 0;
    for (let v = 0; v < model.size; v++) standing += model.standing[v];
    say(this.counts, `${plural(model.size, "node")} · ${plural(standing, "rollout")} here`);
  }

  /** Load the nodes that are new; reload the tree if nodes were forgotten. */
  async _news() {
    if (this.loading) return;
    const mine = this.loads;
    const view = await this.which.part(this.model.lastId);
    if (mine !== this.loads) return;
    const added = this.model.append(view.columns, view.meets);
    if (!view.more && view.nodes !== this.model.size && this.model.size < MOST) {
      await this._again();
      return;
    }
    if (added) this._lay(view);
    else {
      this.model.stand(view);
      this.map.draw();
      if (this.mode === "table") this.table.draw();
      this._say();
    }
    if (added) this._failures();
    this._refresh();
    // While the tree is empty, another tree may become the default.
    if (this.model.size === 1 || performance.now() - this.which.listed > TREES_MS) await this._others();
  }

  /** Reload the list of trees; the default tree may have changed. */
  async _others() {
    await this.which.list();
    this._name();
    const { instead } = this.which;
    if (!instead) return;
    await this._load(this.which.part(0, instead), true);
    this._failures();
  }

  async _again() {
    const chosen = this.chosen === undefined ? null : `n${this.model.id[this.chosen]}`;
    const { collapsed, opened, id } = this.model;
    const ids = [collapsed, opened].map((set) => [...set].map((v) => id[v]));
    await this._load(this.which.part(0), false);
    [this.model.collapsed, this.model.opened] = ids.map((old) => new Set(old.map((n) => this.model.index.get(n)).filter((v) => v !== undefined)));
    this._lay(null);
    this._choose(chosen, false);
    this._failures();
  }

  async _failures() {
    const mine = this.loads;
    const found = await get(`${this.path}/failures?after=${this.failuresUpto}&root=${this.which.root}`, { signal: this.signal }).catch(() => null);
    if (!found || mine !== this.loads) return;
    this.failuresUpto = found.upto;
    this.model.fail(found);
    this.map.draw();
    if (this.mode === "table") this.table.draw();
  }

  /** Fetch the labels of visible nodes after a short delay. */
  _want(nodes) {
    for (const v of nodes) this.wanted.add(v);
    this.fetching ??= setTimeout(() => this._fetch(), 60);
  }

  async _fetch() {
    const chosen = [...this.wanted].slice(-LABELS_AT_ONCE);
    this.wanted.clear();
    try {
      if (chosen.length) await this._labels(chosen);
    } catch {
      // The next draw requests the label again.
    } finally {
      this.fetching = undefined;
    }
    if (this.wanted.size) this._want([]);
  }

  async _labels(chosen) {
    const { model } = this;
    const mine = this.loads;
    const labels = await get(`${this.path}/labels?nodes=${chosen.map((v) => model.id[v]).join(",")}&root=${this.which.root}`, { signal: this.signal });
    if (mine !== this.loads) return;
    for (const label of labels) {
      const v = model.index.get(Number(label.node.slice(1)));
      if (v === undefined) continue;
      this.texts.set(v, { text: oneLine(label.text) });
      if (label.exit_code) model.failed[v] |= 1;
      model.saved[v] += (label.hits - model.hits[v]) * label.seconds;
      model.hits[v] = label.hits;
    }
    for (const v of chosen) if (!this.texts.has(v)) this.texts.set(v, { text: "(forgotten)" });
    this.map.draw();
    if (this.mode === "table") this.table.draw();
  }

  /** Update the hits of visible nodes while rollouts run. */
  _refresh() {
    const { model, map } = this;
    if (this.refreshed && performance.now() - this.refreshed < 3000) return;
    this.refreshed = performance.now();
    const seen = [];
    const { items } = model;
    if (map.kx * 176 < 96) return;
    for (let k = items.at(-map.oy / (40 * map.ky)); k < items.size && seen.length < 120; k++) {
      const i = items.byRow[k];
      const [x, y] = map.placeOf(i);
      if (y > map.height) break;
      if (x > -100 && x < map.width && !items.kind[i]) seen.push(items.node[i]);
    }
    if (seen.length) this._labels(seen).catch(() => {});
  }

  _chooseItem(item) {
    const { items } = this.model;
    if (items.kind[item] === 1) {
      this.model.opened.add(this.model.chainOf(items.node[item]));
      this._lay(null);
      return;
    }
    const v = items.node[item];
    if (items.hidden[item]) {
      this.model.toggle(v);
      this._lay(null);
    }
    this._go(this.model.id[v], false);
  }

  /** Choose a node by its number. */
  _go(id, centre = true) {
    this.which.fixed = true;
    this.setParams({ node: `n${id}` });
    this._choose(`n${id}`, centre);
  }

  _choose(name, centre) {
    const v = name ? this.model.index.get(Number(name.slice(1))) : undefined;
    if (v === this.chosen && v !== undefined) return;
    this.chosen = v;
    this.panel.abort();
    this.panel = new AbortController();
    if (v === undefined) {
      this.side.hidden = true;
      this.map.selected = -1;
      this.map.draw();
      if (name) toast(`The tree has no node ${name}.`, true);
      return;
    }
    if (this.model.reveal(v)) this._lay(null);
    const item = this.model.itemOf[v];
    this.focused = item;
    this.map.selected = item;
    this.side.hidden = false;
    requestAnimationFrame(() => this.map.show(item, centre));
    this.table.select(item);
    this._panel(name);
  }

  _panel(name) {
    const close = h("button", { class: "quiet icon close", "aria-label": "Close", title: "Close (Esc)", on: { click: () => this._close() } }, icon("close"));
    const body = h("div");
    put(this.side, close, body);
    this.side.scrollTop = 0;
    nodePanel(body, this.task, name, this.panel.signal, { gone: () => { this._close(); this._again(); }, go: (node) => this._go(Number(node.slice(1))) });
  }

  _close() {
    this.setParams({ node: null });
    this._choose(null, false);
    (this.mode === "map" ? this.map.canvas : this.table.grid).focus();
  }

  _focus(item) {
    this.focused = item;
    this.table.select(item);
    this.map.selected = item;
    this.map.show(item);
  }

  _toggle(item) {
    const { items } = this.model;
    const v = items.node[item];
    if (items.kind[item] === 1) this.model.opened.add(this.model.chainOf(v));
    else if (!this.model.toggle(v)) return;
    this._lay(null);
  }

  _fold() {
    this.model.folding = !this.model.folding;
    this.model.opened.clear();
    this.main.querySelector(".fold").setAttribute("aria-pressed", String(this.model.folding));
    this._lay(null);
  }

  _found(ids) {
    this.map.found = new Set(ids.map((id) => this.model.index.get(id)).filter((v) => v !== undefined));
    this.map.draw();
  }

  _hover(item, at) {
    this.tip.hidden = item < 0;
    if (item < 0) return;
    const { model } = this;
    const v = model.items.node[item];
    const fold = model.items.kind[item];
    const label = fold ? { text: `${count(model.items.count[item])} calls in a chain without branches` } : v === 0 ? { text: "start: the task's root state" } : this.texts.get(v);
    if (!label) this._want([v]);
    const marks = marksOf(model.bits(item), model.names?.[model.id[v]]);
    put(
      this.tip,
      h("div", { class: fold ? "" : "mono" }, label?.text ?? "…"),
      h("div", { class: "dim" }, [fold ? "" : `n${model.id[v]}`, seconds(model.sum(item, model.seconds)), plural(model.sum(item, model.hits), "hit"), plural(model.sum(item, model.seen), "read"), `${seconds(model.sum(item, model.saved))} saved`, `${short(model.below[fold ? model.items.last[item] : v])} below`].filter(Boolean).join(" · ")),
      marks.length ? h("div", { class: "chips" }, marks.map(([word, kind]) => h("span", { class: `chip ${kind}` }, word))) : null,
    );
    this.tip.style.left = `${Math.min(at[0] + 14, this.map.width - 300)}px`;
    this.tip.style.top = `${at[1] + 16 > this.map.height - 90 ? at[1] - 84 : at[1] + 16}px`;
  }

  /** Write the visible part into the address after it stops moving. */
  _moved() {
    clearTimeout(this.resting);
    this.resting = setTimeout(() => {
      const { kx, ky, ox, oy } = this.map;
      this.setParams({ at: [kx.toPrecision(4), ky.toPrecision(4), Math.round(ox), Math.round(oy)].join("_") });
    }, 400);
  }

  _restoreView() {
    const at = (this.params.get("at") ?? "").split("_").map(Number);
    if (at.length !== 4 || at.some((n) => !Number.isFinite(n)) || at[0] <= 0 || at[1] <= 0) return;
    [this.map.kx, this.map.ky, this.map.ox, this.map.oy] = at;
    this.map.moved();
  }

  _key(event) {
    const { items } = this.model;
    const i = Math.max(0, this.focused);
    const to = { ArrowRight: items.children[i] ? i + 1 : i, ArrowLeft: Math.max(0, items.up[i]), ArrowDown: items.beside(i, 1), ArrowUp: items.beside(i, -1), Home: 0, End: items.size - 1 }[event.key];
    if (to !== undefined) this._focus(to);
    else if (event.key === "Enter") this._chooseItem(i);
    else if (event.key === " ") this._toggle(i);
    else return;
    const v = items.node[this.focused];
    this.map.canvas.setAttribute("aria-label", `${this.texts.get(v)?.text ?? (v === 0 ? "start" : `node n${this.model.id[v]}`)}, ${plural(this.model.hits[v], "hit")}`);
    event.preventDefault();
  }

  _anywhere(event) {
    if (event.target.closest?.("input, select, textarea, dialog, .term-box") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { "+": () => this.map.zoom(1.5), "=": () => this.map.zoom(1.5), "-": () => this.map.zoom(1 / 1.5), 0: () => this.map.fit(), m: () => this.modes[this.mode === "map" ? 1 : 0].click(), Escape: () => this._close() }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}
