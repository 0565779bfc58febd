// A menu of further actions: a button that opens a list of buttons. Escape and a click elsewhere close it.

import { h } from "./dom.js";

export function menu(title, items) {
  const list = h("div", { class: "menu-items", role: "group", "aria-label": title }, items.filter(Boolean));
  const summary = h("summary", { class: "button" }, title);
  const element = h("details", { class: "menu" }, summary, list);
  const away = (event) => {
    if (!element.isConnected || !element.open) return stop();
    const escaped = event.type === "keydown" && event.key === "Escape";
    if (event.type === "keydown" ? !escaped : element.contains(event.target)) return;
    element.open = false;
    stop();
    if (!escaped) return;
    event.stopPropagation();
    summary.focus();
  };
  const stop = () => {
    document.removeEventListener("pointerdown", away, true);
    document.removeEventListener("keydown", away, true);
  };
  const listen = () => {
    stop();
    document.addEventListener("pointerdown", away, true);
    document.addEventListener("keydown", away, true);
  };
  // A moment before `toggle`, which comes later than the next key may: that key would close what is behind the menu.
  summary.addEventListener("click", listen);
  element.addEventListener("toggle", () => (element.open ? listen() : stop()));
  list.addEventListener("click", () => (element.open = false));
  return element;
}
