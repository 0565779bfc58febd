// The tree of a task: loaded in parts, shown as a map or a table, updated live, with the chosen node beside it.

import { names } from "./api.js";
import { h, icon, put, toast } from "./dom.js";
import { count, plural } from "./format.js";
import { watch } from "./live.js";
import { nodePanel } from "./node.js";
import { TreeMap } from "./tree/canvas.js";
import { Colours, MEASURES } from "./tree/colours.js";
import { finder, results } from "./tree/finder.js";
import { anyKey, mapKey } from "./tree/keys.js";
import { lanes } from "./tree/lanes.js";
import { legend } from "./tree/legend.js";
import { Loading } from "./tree/loading.js";
import { Model } from "./tree/model.js";
import { FRESH_MS } from "./tree/near.js";
import { litWay } from "./tree/routes.js";
import { Side } from "./tree/side.js";
import { TreeTable } from "./tree/table.js";
import { Texts } from "./tree/texts.js";
import { showTip } from "./tree/tip.js";
import { Toolbar } from "./tree/toolbar.js";
import { Ways } from "./tree/ways.js";
import { TreeChoice, Which } from "./trees.js";

const TREES_MS = 5000;
/** Reads for each node from which a tree counts as read-heavy. */
const MOSTLY = 4;

export async function treeView(context, task) {
  const view = new TreeView(context, task);
  await view.open();
  return view;
}

const NARROW = 640;

class TreeView {
  constructor({ main, params, signal, setParams }, task) {
    Object.assign(this, { main, signal, setParams, task });
    this.path = `tasks/${names(task)}`;
    this.model = new Model();
    this.params = params;
    /** How the tree is shown without a choice. On a narrow window, the map has no room for calls. */
    this.usual = window.innerWidth < NARROW ? "table" : "map";
    this.focused = 0;
    this.which = new Which(task, params, signal);
    this.loading = new Loading(this.path, this.model, this.which, signal);
    this.ways = new Ways(this.path, signal);
    this.colours = new Colours(this.model, this.ways);
    this.texts = new Texts(this.path, this.model, signal, () => this.which.root, () => this._redraw());
    this.following = false;
    this.panel = new AbortController();
    signal.addEventListener("abort", () => this.panel.abort());
  }

  async open() {
    performance.mark("tree-open");
    this._frame();
    await this._load(this.which.first(this.params), true);
    this._reads();
    this._choose(this.params.get("node"), true);
    performance.mark("tree-ready");
    this.main.dataset.ready = "1";
    this._failures();
    this._loadWays();
    if (this.params.get("lanes")) this._lanes(true);
    this.which.listing.then(() => this._name());
    if (this.params.get("q")) this.finder.look();
    watch(() => this._news(), this.signal);
  }

  /** Show a tree whose calls are mostly reads as a table, and if all of them are, the reads: its map would be empty. */
  _reads() {
    const reads = this.model.seen.subarray(0, this.model.size).reduce((sum, count) => sum + count, 0);
    if (reads < MOSTLY * this.model.size) return;
    this.usual = "table";
    this._mode(this._modeOf(this.params));
    const free = window.innerWidth >= NARROW && !this.params.get("node") && !this.params.get("lanes");
    if (free && this.model.size === 1) this.params.set("node", `n${this.model.id[0]}`);
  }

  /** React to a change of the address's query: another node, tree or mode. */
  async update(params) {
    this.params = params;
    this._mode(this._modeOf(params));
    const node = params.get("node");
    const root = params.get("root") ?? this.which.usual;
    const elsewhere = node ? !this.model.index.has(Number(node.slice(1))) : root !== this.which.root;
    if (elsewhere) await this._show(node ?? root).catch(() => {});
    this.which.fixed = Boolean(node ?? params.get("root"));
    if (params.has("own") !== this.which.own) await this._own(params.has("own"));
    if (params.get("lanes")) this._lanes(true);
    else this._choose(node, false);
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
    const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": `Map of the tree of ${this.task}. Press m for an accessible table.`, on: { keydown: (event) => mapKey(this, event) } });
    this.stage = h("div", { class: "stage" }, canvas);
    this.side = new Side(() => this.close());
    this.tip = h("div", { class: "tip", hidden: true });
    this.main.className = "tree";
    this.choice = new TreeChoice((root) => {
      this.setParams({ node: null, at: null });
      this.params.delete("at");
      this._show(root).catch((error) => toast(error.message, true));
    });
    this.finder = finder(this.task, signal, { tree: () => this.which.root, choose: (node) => this._go(node), found: (ids) => this._found(ids), list: (hits) => this._results(hits), query: params.get("q") ?? "", setQuery: (q) => this.setParams({ q }) });
    this.colours.by = params.get("colour") ?? "hits";
    this.toolbar = new Toolbar(this, this.finder.element, this.choice.element, {
      mode: (mode) => this.switchTo(mode), size: (size) => { this.map.size = size; this.map.changed(); }, colour: (by) => this._colour(by),
      fold: () => this._fold(), follow: () => (this.following = !this.following), lanes: (on) => this._lanes(on), own: (on) => this._own(on),
    });
    put(this.main, h("h1", { class: "sr" }, `Tree of ${this.task}`), this.toolbar.element, h("div", { class: "field-row" }, this.stage, this.side.element));
    this.map = new TreeMap(
      canvas, this.model, this.colours,
      { choose: (item) => this.chooseItem(item), labels: (nodes) => this.texts.want(nodes), moved: () => this._moved(), hover: (...seen) => this._hover(...seen) },
      signal,
    );
    this.map.texts = this.texts;
    this.map.size = params.get("size") ?? "saved";
    this.table = new TreeTable(this.model, this.texts, { choose: (item) => this.chooseItem(item), focus: (item) => this.focus(item), toggle: (item) => this.toggle(item), labels: (nodes) => this.texts.want(nodes) });
    this.legend = legend();
    this.stage.append(this._zoom(), this.legend.element, this.tip, this.table.grid);
    document.addEventListener("theme", () => this._scale(), { signal });
    this._scale();
    this._mode(this._modeOf(params));
    window.addEventListener("keydown", (event) => anyKey(this, event), { signal });
  }

  _colour(by) {
    this.colours.by = by;
    this._recolour();
    this._loadWays(true);
  }

  _recolour() {
    this.colours.changed();
    this.map.changed();
    this._scale();
  }

  _scale() {
    const { by } = this.colours;
    this.legend.show(Object.fromEntries(MEASURES)[by] ?? by.slice(6), this.colours.scale);
  }

  /** Load the ways of the rollouts, and offer their labels as colours. */
  async _loadWays(force = false) {
    try {
      if (!(await this.ways.load(this.which, force))) return;
    } catch {
      return;
    }
    this.toolbar.offer(this.ways.labelNames);
    if (this.colours.by === "reward" || this.colours.by.startsWith("label:")) this._recolour();
    if (this.side.kind === "lanes" && !this.side.busy) this._drawLanes();
  }

  /** Show the rollouts as lanes beside the tree, or close them. */
  _lanes(on) {
    this.setParams({ lanes: on ? "1" : null, node: on ? null : undefined });
    if (!on) {
      this.close();
      return;
    }
    this._choose(null, false);
    this._open("lanes");
    this._drawLanes();
    this._loadWays(true);
  }

  /** Show only what this task did in a tree that tasks share, or all. */
  async _own(on) {
    this.setParams({ own: on ? "1" : null });
    this.toolbar.own.setAttribute("aria-pressed", String(on));
    this.which.own = on;
    await this._again();
    this._loadWays(true);
  }

  _drawLanes() {
    lanes(this.side.body, this.task, this.ways, { light: (way) => this._light(way) });
  }

  _light(way) {
    this.map.lit = litWay(this.model, way);
    this.map.draw();
  }

  /** Show the matches of the search as a list beside the tree. */
  _results(hits) {
    this._choose(null, false);
    results(this._open("results"), hits, (node) => this._go(node));
  }

  /** Open the panel beside the tree, and return the element for its content. kind: `node`, `lanes` or `results`. */
  _open(kind) {
    this.toolbar.showLanes(kind === "lanes");
    return this.side.open(kind);
  }

  _zoom() {
    const button = (text, title, act) => h("button", { class: "icon", title, "aria-label": title, on: { click: act } }, text);
    return h("div", { class: "zoom" }, button("+", "Zoom in", () => this.map.zoom(1.5)), button("−", "Zoom out", () => this.map.zoom(1 / 1.5)), button(icon("fit"), "Show all", () => this.map.fit()));
  }

  _modeOf(params) {
    return { table: "table", map: "map" }[params.get("view")] ?? this.usual;
  }

  _mode(mode) {
    this.mode = mode;
    this.toolbar.showMode(mode);
    this.main.dataset.mode = mode;
    this.table.grid.hidden = mode === "map";
    if (mode === "table") this.table.changed();
  }

  /** Show a mode that was asked for, and write it into the address. */
  switchTo(mode) {
    this._mode(mode);
    this.setParams({ view: mode === this.usual ? null : mode });
  }

  /** Load a tree, beginning with its first part. anew: reset position and zoom. */
  async _load(coming, anew) {
    const begin = () => {
      this._begin();
      if (anew) this.focused = 0;
    };
    const view = await this.loading.tree(coming, begin, (first) => anew && this._first(first));
    if (!view) return;
    if (view.more) toast(`Only the first ${count(this.model.size)} calls are shown.`);
    this._lay(view);
  }

  /** Show the first part of a tree, at the position that the address names. */
  _first(part) {
    this._lay(part);
    this.map.begin();
    this.map.at = this.params.get("at") ?? "";
    performance.mark("tree-first");
  }

  _begin() {
    this.texts.clear();
    this.chosen = undefined;
    this.map.found = new Set();
    this.toolbar.showTree(this.task, this.which.root);
    this._name();
  }

  /** Update the select box, and the address unless it is the default tree. */
  _name() {
    const { trees, root, usual } = this.which;
    if (!trees) return;
    this.choice.show(trees, root);
    this.toolbar.showSharers(this.which.shown?.shared_with ?? []);
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
    this.toolbar.say(`${plural(model.size, "node")} · ${plural(standing, "rollout")} here`);
  }

  /** Load the nodes that are new; reload the tree if nodes were forgotten. */
  async _news() {
    if (this.loading.running) return;
    const news = await this.loading.news();
    if (!news) return;
    if (news.forgotten) {
      await this._again();
      return;
    }
    const { part: view, added } = news;
    if (added) {
      this.map.fresh = { from: this.model.size - added, until: performance.now() + FRESH_MS };
      this._lay(view);
      if (this.following) this.map.show(this.model.itemOf[this.model.size - 1]);
    } else {
      this.model.stand(view);
      this.map.draw();
      if (this.mode === "table") this.table.draw();
      this._say();
    }
    if (added) this._failures();
    // Hits of visible nodes go on while rollouts run.
    this.texts.refresh(this.map.inSight());
    this._loadWays();
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
    if (await this.loading.failures()) this._redraw();
  }

  _redraw() {
    this.map.draw();
    if (this.mode === "table") this.table.draw();
  }

  chooseItem(item) {
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
      this.side.hide();
      this.map.selected = -1;
      this.map.draw();
      if (name) toast(`The tree has no node ${name}.`, true);
      return;
    }
    if (this.model.reveal(v)) this._lay(null);
    const item = this.model.itemOf[v];
    this.focused = item;
    this.map.selected = item;
    requestAnimationFrame(() => this.map.show(item, centre));
    this.table.select(item);
    this._panel(name);
  }

  _panel(name) {
    nodePanel(this._open("node"), this.task, name, this.panel.signal, { own: this.which.own, gone: () => { this.close(); this._again(); }, go: (node) => this._go(Number(node.slice(1))) });
  }

  close() {
    this.setParams({ node: null, lanes: null });
    this.toolbar.showLanes(false);
    this._light(null);
    this._choose(null, false);
    (this.mode === "map" ? this.map.canvas : this.table.grid).focus();
  }

  focus(item) {
    this.focused = item;
    this.table.select(item);
    this.map.selected = item;
    this.map.show(item);
  }

  toggle(item) {
    const { items } = this.model;
    const v = items.node[item];
    if (items.kind[item] === 1) this.model.opened.add(this.model.chainOf(v));
    else if (!this.model.toggle(v)) return;
    this._lay(null);
  }

  _fold() {
    this.model.folding = !this.model.folding;
    this.model.opened.clear();
    this._lay(null);
    return this.model.folding;
  }

  _found(ids) {
    this.map.found = new Set(ids.map((id) => this.model.index.get(id)).filter((v) => v !== undefined));
    this.map.draw();
  }

  _hover(item, at, near) {
    this.tip.hidden = item < 0;
    const v = item < 0 ? undefined : this.model.items.node[item];
    const name = v === undefined ? undefined : this.model.names?.[this.model.id[v]]?.[0];
    // A node where rollouts are lights the way of the first of them.
    if (this.side.kind !== "lanes") this.map.lit = name ? litWay(this.model, this.ways.byName.get(name)) : null;
    if (item >= 0) showTip(this.tip, this, item, near, at);
  }

  /** Write the visible part into the address after it stops moving. */
  _moved() {
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.setParams({ at: this.map.at }), 400);
  }
}
