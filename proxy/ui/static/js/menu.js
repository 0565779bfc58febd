// A menu of further actions: a button that opens a list of buttons. Escape and a click elsewhere close it.

import { h } from "./dom.js";

export function menu(title, items) {
  const list = h("div", { class: "menu-items", role: "group", "aria-label": title }, items.filter(Boolean));
  const element = h("details", { class: "menu" }, h("summary", { class: "button" }, title), list);
  const away = (event) => {
    if (event.type === "keydown" ? event.key === "Escape" : !element.contains(event.target)) element.open = false;
    if (!element.isConnected || !element.open) stop();
    if (event.type === "keydown" && event.key === "Escape") {
      event.stopPropagation();
      element.querySelector("summary").focus();
    }
  };
  const stop = () => {
    document.removeEventListener("pointerdown", away, true);
    document.removeEventListener("keydown", away, true);
  };
  element.addEventListener("toggle", () => {
    stop();
    if (!element.open) return;
    document.addEventListener("pointerdown", away, true);
    document.addEventListener("keydown", away, true);
  });
  list.addEventListener("click", () => (element.open = false));
  return element;
}
