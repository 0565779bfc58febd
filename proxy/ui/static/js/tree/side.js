// The panel beside a tree: the chosen node, the rollouts as lanes, or the matches of a search.

import { h, icon, put } from "../dom.js";
import { resizable } from "../resize.js";

export class Side {
  /** close: what its button calls. */
  constructor(close) {
    this.close = close;
    this.element = h("aside", { class: "side", "aria-label": "Chosen call", hidden: true });
    /** What it shows: `node`, `lanes` or `results`; empty while it is closed. */
    this.kind = "";
  }

  /** Open it, empty, and return the element for its content. */
  open(kind) {
    const button = h("button", { class: "quiet icon close", "aria-label": "Close", title: "Close (Esc)", on: { click: this.close } }, icon("close"));
    this.kind = kind;
    this.body = h("div", { class: "panel-body" });
    put(this.element, resizable(this.element), button, this.body);
    this.element.hidden = false;
    this.element.scrollTop = 0;
    return this.body;
  }

  hide() {
    this.kind = "";
    this.element.hidden = true;
  }

  /** Whether a lane is pointed at or has the focus, and must not be drawn anew. */
  get busy() {
    return Boolean(this.element.querySelector(".lane:hover, .lane:focus-within"));
  }
}
