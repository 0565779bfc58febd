// The controls over a tree: search, map or table, size and colour of its nodes, folding, rollouts, and other trees.

import { exportLink } from "../carry.js";
import { h, put, say } from "../dom.js";
import { MEASURES } from "./colours.js";

const SIZES = { saved: "seconds saved", hits: "hits", seconds: "seconds", observations: "reads" };
const pressed = (button, on) => button.setAttribute("aria-pressed", String(on));

export class Toolbar {
  /**
   * asked: what the controls call. `mode`, `size` and `colour` are given the choice, `lanes` and `own` whether it is on;
   * `fold` and `follow` return whether they are on now.
   */
  constructor({ params, setParams }, search, trees, asked) {
    Object.assign(this, { params, setParams });
    const toggle = (text, on, options, act) => h("button", { "aria-pressed": String(on), ...options, on: { click: (event) => act(event.currentTarget) } }, text);
    this.modes = ["map", "table"].map((mode) => h("button", { on: { click: () => asked.mode(mode) } }, mode === "map" ? "Map" : "Table"));
    this.colour = this._select("colour", "Colour", MEASURES, asked.colour);
    this.lanes = toggle("Rollouts", false, {}, (button) => asked.lanes(button.getAttribute("aria-pressed") !== "true"));
    const fold = toggle("Fold chains", true, { class: "fold" }, (button) => pressed(button, asked.fold()));
    this.own = toggle("Only this task", params.has("own"), { hidden: true }, (button) => asked.own(button.getAttribute("aria-pressed") !== "true"));
    const follow = toggle("Follow", false, { class: "for-map", title: "Move to each new call" }, (button) => pressed(button, asked.follow()));
    this.counts = h("span", { class: "counts" });
    this.saving = h("span");
    this.element = h(
      "div", { class: "tools" }, search, h("div", { class: "group", role: "group", "aria-label": "View" }, this.modes),
      this._select("size", "Size", Object.entries(SIZES), asked.size), this.colour, fold, follow, this.lanes, trees, this.own,
      h("span", { class: "gap" }), this.counts, this.saving,
    );
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

  /** Offer labels of rollouts as colours. */
  offer(labels) {
    const select = this.colour.querySelector("select");
    const known = new Set([...select.options].map((option) => option.value));
    for (const name of labels) if (!known.has(`label:${name}`)) select.append(h("option", { value: `label:${name}` }, name));
  }

  showMode(mode) {
    this.modes.forEach((button, i) => pressed(button, (i === 0) === (mode === "map")));
  }

  showLanes(on) {
    pressed(this.lanes, on);
  }

  /** Offer to show only what this task did, where other tasks share its tree. */
  showSharers(tasks) {
    this.own.hidden = tasks.length === 0;
    this.own.title = `Shared with ${tasks.slice(0, 20).join(", ")}${tasks.length > 20 ? ` and ${tasks.length - 20} more` : ""}`;
    say(this.own, `Only this task (shared with ${tasks.length})`);
  }

  /** Show which tree it is, so that Export saves this one. */
  showTree(task, root) {
    put(this.saving, exportLink(task, root));
  }

  say(text) {
    say(this.counts, text);
  }
}
