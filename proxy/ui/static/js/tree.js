// The tree of a task: loaded in parts, shown as a map or a table, updated live, with the chosen node beside it.

import { get, names } from "./api.js";
import { h, icon, put, say, toast } from "./dom.js";
import { count, plural } from "./format.js";
import { watch } from "./live.js";
import { nodePanel } from "./node.js";
import { exportLink } from "./carry.js";
import { resizable } from "./resize.js";
import { TreeMap } from "./tree/canvas.js";
import { Colours, MEASURES } from "./tree/colours.js";
import { finder, results } from "./tree/finder.js";
import { lanes } from "./tree/lanes.js";
import { legend } from "./tree/legend.js";
import { Model } from "./tree/model.js";
import { FRESH_MS } from "./tree/near.js";
import { litWay } from "./tree/routes.js";
import { TreeTable } from "./tree/table.js";
import { Texts } from "./tree/texts.js";
import { showTip } from "./tree/tip.js";
import { Ways } from "./tree/ways.js";
import { TreeChoice, Which } from "./trees.js";

const MOST = 300_000;
const SIZES = { saved: "seconds saved", hits: "hits", seconds: "seconds", observations: "reads" };
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
    this.failuresUpto = 0;
    this.params = params;
    this.focused = 0;
    this.loads = 0;
    this.which = new Which(task, params, signal);
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
    this.finder = finder(this.task, signal, { tree: () => this.which.root, choose: (node) => this._go(node), found: (ids) => this._found(ids), list: (hits) => this._results(hits), query: params.get("q") ?? "", setQuery: (q) => this.setParams({ q }) });
    this.colours.by = params.get("colour") ?? "hits";
    this.colourSelect = this._select("colour", "Colour", MEASURES, (by) => this._colour(by));
    this.laneButton = h("button", { "aria-pressed": "false", on: { click: () => this._lanes(this.laneButton.getAttribute("aria-pressed") !== "true") } }, "Rollouts");
    this.follow = h("button", { class: "for-map", "aria-pressed": "false", title: "Move to each new call", on: { click: () => this._follow() } }, "Follow");
    put(
      this.main,
      h("h1", { class: "sr" }, `Tree of ${this.task}`),
      h(
        "div", { class: "tools" }, this.finder.element, h("div", { class: "group", role: "group", "aria-label": "View" }, this.modes),
        this._select("size", "Size", Object.entries(SIZES), (size) => { this.map.size = size; this.map.changed(); }), this.colourSelect,
        h("button", { class: "fold", "aria-pressed": "true", on: { click: () => this._fold() } }, "Fold chains"), this.follow, this.laneButton, this.choice.element,
        h("span", { class: "gap" }), this.counts, this.saving,
      ),
      h("div", { class: "field-row" }, this.stage, this.side),
    );
    this.map = new TreeMap(
      canvas, this.model, this.colours,
      { choose: (item) => this._chooseItem(item), labels: (nodes) => this.texts.want(nodes), moved: () => this._moved(), hover: (...seen) => this._hover(...seen) },
      signal,
    );
    this.map.texts = this.texts;
    this.map.size = params.get("size") ?? "saved";
    this.table = new TreeTable(this.model, this.texts, { choose: (item) => this._chooseItem(item), focus: (item) => this._focus(item), toggle: (item) => this._toggle(item), labels: (nodes) => this.texts.want(nodes) });
    this.legend = legend();
    this.stage.append(this._zoom(), this.legend.element, this.tip, this.table.grid);
    document.addEventListener("theme", () => this._scale(), { signal });
    this._scale();
    this._mode(modeOf(params));
    window.addEventListener("keydown", (event) => this._anywhere(event), { signal });
  }

  _select(name, title, choices, chosen) {
    const usual = choices[0][0];
    const select = h("select", { on: { change: () => { this.setParams({ [name]: select.value === usual ? null : select.value }); chosen(select.value); } } }, choices.map(([value, text]) => h("option", { value }, text)));
    const wanted = this.params.get(name) ?? usual;
    // A label is known once the ways are loaded.
    if (wanted.startsWith("label:")) select.append(h("option", { value: wanted }, wanted.slice(6)));
    select.value = wanted;
    return h("label", { class: "inline for-map" }, title, select);
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
      if (!(await this.ways.load(this.which.root, force))) return;
    } catch {
      return;
    }
    const select = this.colourSelect.querySelector("select");
    const known = new Set([...select.options].map((option) => option.value));
    for (const name of this.ways.labelNames) if (!known.has(`label:${name}`)) select.append(h("option", { value: `label:${name}` }, name));
    if (this.colours.by === "reward" || this.colours.by.startsWith("label:")) this._recolour();
    if (this.showsLanes && !this.side.querySelector(".lane:hover, .lane:focus-within")) this._drawLanes();
  }

  _follow() {
    this.following = !this.following;
    this.follow.setAttribute("aria-pressed", String(this.following));
  }

  /** Show the rollouts as lanes beside the tree, or close them. */
  _lanes(on) {
    this.setParams({ lanes: on ? "1" : null, node: on ? null : undefined });
    if (!on) {
      this._close();
      return;
    }
    this._choose(null, false);
    this._open("lanes");
    this._drawLanes();
    this._loadWays(true);
  }

  _drawLanes() {
    lanes(this.panelBody, this.task, this.ways, { light: (way) => this._light(way) });
  }

  _light(way) {
    this.map.lit = litWay(this.model, way);
    this.map.draw();
  }

  /** Show the matches of the search as a list beside the tree. */
  _results(hits) {
    this._choose(null, false);
    this._open("results");
    results(this.panelBody, hits, (node) => this._go(node));
  }

  /** Open the panel beside the tree. kind: `node`, `lanes` or `results`. */
  _open(kind) {
    this.showsLanes = kind === "lanes";
    this.laneButton.setAttribute("aria-pressed", String(this.showsLanes));
    const close = h("button", { class: "quiet icon close", "aria-label": "Close", title: "Close (Esc)", on: { click: () => this._close() } }, icon("close"));
    this.panelBody = h("div", { class: "panel-body" });
    put(this.side, resizable(this.side), close, this.panelBody);
    this.side.hidden = false;
    this.side.scrollTop = 0;
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
    this._refresh();
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
    const mine = this.loads;
    const found = await get(`${this.path}/failures?after=${this.failuresUpto}&root=${this.which.root}`, { signal: this.signal }).catch(() => null);
    if (!found || mine !== this.loads) return;
    this.failuresUpto = found.upto;
    this.model.fail(found);
    this._redraw();
  }

  _redraw() {
    this.map.draw();
    if (this.mode === "table") this.table.draw();
  }

  /** Update the hits of visible nodes while rollouts run. */
  _refresh() {
    const { map } = this;
    const seen = [];
    const { items } = this.model;
    if (map.kx * 176 < 96) return;
    for (let k = items.at(-map.oy / (40 * map.ky)); k < items.size && seen.length < 120; k++) {
      const i = items.byRow[k];
      const [x, y] = map.placeOf(i);
      if (y > map.height) break;
      if (x > -100 && x < map.width && !items.kind[i]) seen.push(items.node[i]);
    }
    this.texts.refresh(seen);
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
    requestAnimationFrame(() => this.map.show(item, centre));
    this.table.select(item);
    this._panel(name);
  }

  _panel(name) {
    this._open("node");
    nodePanel(this.panelBody, this.task, name, this.panel.signal, { gone: () => { this._close(); this._again(); }, go: (node) => this._go(Number(node.slice(1))) });
  }

  _close() {
    this.setParams({ node: null, lanes: null });
    this.showsLanes = false;
    this.laneButton.setAttribute("aria-pressed", "false");
    this._light(null);
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

  _hover(item, at, near) {
    this.tip.hidden = item < 0;
    const v = item < 0 ? undefined : this.model.items.node[item];
    const name = v === undefined ? undefined : this.model.names?.[this.model.id[v]]?.[0];
    // A node where rollouts are lights the way of the first of them.
    if (!this.showsLanes) this.map.lit = name ? litWay(this.model, this.ways.byName.get(name)) : null;
    if (item >= 0) showTip(this.tip, this, item, near, at);
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
