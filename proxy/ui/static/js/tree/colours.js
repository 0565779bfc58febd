// What colours a node, and the scale that the legend shows of it.

import { seconds } from "../format.js";
import { level } from "./scale.js";

const STEPS = [1, 2, 3, 4, 5];
const EFFECTS = ["nothing", "files", "session", "processes", "a database", "unknown"];

/** Measures by which nodes are coloured, in the order of the select box. `label:` measures come after them. */
export const MEASURES = [
  ["hits", "hits"], ["saved", "seconds saved"], ["seconds", "seconds"], ["failures", "failures"], ["reward", "reward"], ["effect", "effect"],
];

const UNITS = { hits: 1, saved: 0.1, seconds: 0.01 };

export class Colours {
  constructor(model, ways) {
    Object.assign(this, { model, ways, by: "hits", values: [], range: null });
  }

  /** Take the theme's colours from custom properties. */
  theme(read) {
    this.blues = [0, 1, 2, 3, 4, 5].map((n) => read(`--s${n}`));
    this.effects = ["--s1", "--accent", "--replay", "--miss", "--wait", "--bad"].map(read);
    this.rewards = [0, 1, 2, 3, 4].map((n) => read(`--w${n}`));
    this.labels = [0, 1, 2, 3, 4, 5, 6, 7].map((n) => read(`--c${n}`));
    this.none = read("--s0");
    this.several = read("--faint");
    this.failed = [read("--s0"), read("--bad"), read("--warm"), read("--bad")];
    this.changed();
  }

  /** All colours that nodes can have. */
  get all() {
    return [...this.blues, ...this.effects, ...this.rewards, ...this.labels, this.none, this.several, ...this.failed];
  }

  /** Recompute what depends on the ways: the range of rewards, or the values of the label. */
  changed() {
    this.range = this.by === "reward" ? this.ways.rewards : null;
    this.values = this.by.startsWith("label:") ? this.ways.valuesOf(this.by.slice(6)) : [];
    this.rank = new Map(this.values.map((value, at) => [value, at]));
    this.known = new Map();
  }

  /** Return the colour of a node. */
  of(v) {
    const { model } = this;
    if (this.by === "hits") return this.blues[level(model.hits[v] + model.seen_hits[v], UNITS.hits)];
    if (this.by === "seconds") return this.blues[level(model.seconds[v], UNITS.seconds)];
    if (this.by === "saved") return this.blues[level(model.saved[v], UNITS.saved)];
    if (this.by === "effect") return this.effects[effectOf(model.effect[v])];
    if (this.by === "failures") return this.failed[model.failed[v]];
    const id = model.id[v];
    let colour = this.known.get(id);
    if (colour === undefined) this.known.set(id, (colour = this._byRollouts(id)));
    return colour;
  }

  _byRollouts(id) {
    if (this.by === "reward") {
      const reward = this.ways.reward(id);
      if (reward === null) return this.none;
      const [low, high] = this.range ?? [reward, reward];
      return this.rewards[high > low ? Math.round(((reward - low) / (high - low)) * 4) : 4];
    }
    const value = this.ways.label(id, this.by.slice(6));
    if (value === null) return this.none;
    return value === "" ? this.several : (this.labels[this.rank.get(value)] ?? this.several);
  }

  /** Return the scale: pairs of a colour and its words. */
  get scale() {
    if (this.by === "effect") return this.effects.map((colour, at) => [colour, EFFECTS[at]]);
    if (this.by === "failures") return [[this.none, "none"], [this.failed[1], "the call failed"], [this.failed[2], "a read failed"]];
    if (this.by === "reward") {
      const [low, high] = this.range ?? [0, 1];
      return [[this.none, "no reward"], ...this.rewards.map((colour, at) => [colour, (low + ((high - low) * at) / 4).toPrecision(2).replace(/\.0$/, "")])];
    }
    if (this.by.startsWith("label:")) {
      const named = this.values.slice(0, this.labels.length).map((value, at) => [this.labels[at], value]);
      return [...named, [this.several, this.values.length > named.length ? "several, or others" : "several"], [this.none, "none"]];
    }
    const unit = UNITS[this.by];
    const word = (n) => (this.by === "hits" ? String(n) : seconds(n));
    return [[this.blues[0], "0"], ...STEPS.map((n) => [this.blues[n], n === 1 ? `to ${word(unit)}` : n === 5 ? `over ${word(unit * 4 ** 3)}` : `to ${word(unit * 4 ** (n - 1))}`])];
  }
}

/** Return the index of an effect's colour: none, files, session, processes, database, unknown. */
function effectOf(bits) {
  if (bits & 16) return 5;
  if (bits & 8) return 4;
  if (bits & 4) return 3;
  return bits & 1 ? 1 : bits & 2 ? 2 : 0;
}
