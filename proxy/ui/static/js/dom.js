// Elements out of values. Text is always text: nothing here, nor anywhere in the page, parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Members of `options`: `class`, `on` (listeners), `data`, `style` (of CSSOM), others are attributes. */
export function h(tag, options = {}, ...children) {
  return fill(document.createElement(tag), options, children);
}

export function svg(tag, options = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), options, children);
}

function fill(element, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") for (const [property, told] of Object.entries(value)) element.style.setProperty(property, told);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

/** Make the head of a table: of each column its title, and its class if it has one. */
export function thead(columns) {
  return h("thead", {}, h("tr", {}, columns.map(([text, kind]) => h("th", { scope: "col", class: kind ?? "" }, text))));
}

/** Put children in the place of all that an element holds. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

/** Set an element's text only where it differs: a live page is not laid out anew for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Tell something for a few seconds, to screen readers too. */
export function toast(text, bad = false) {
  const note = h("div", { class: bad ? "toast bad" : "toast" }, text);
  document.getElementById("said").append(note);
  setTimeout(() => note.remove(), bad ? 9000 : 4500);
}

/** A problem, where a view would have been. */
export function notice(error) {
  return h("div", { class: "notice", role: "alert" }, h("strong", {}, error.title ?? "That did not work"), h("p", {}, error.message));
}

export const ICONS = {
  mark: "M3 8h4M7 8c2.6 0 1.4-4.5 5-4.5M7 8c2.6 0 1.4 4.5 5 4.5",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13.5 9.5A5.7 5.7 0 0 1 6.5 2.5a5.7 5.7 0 1 0 7 7Z",
  auto: "M8 2a6 6 0 1 0 0 12V2Z",
};

export function icon(name) {
  const fills = name === "auto" ? "currentColor" : "none";
  return svg(
    "svg",
    { viewBox: "0 0 16 16", width: 16, height: 16, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linecap": "round", "aria-hidden": "true" },
    svg("path", { d: ICONS[name], fill: fills }),
    name === "auto" && svg("circle", { cx: 8, cy: 8, r: 6 }),
    name === "mark" && [[2.6, 8], [12.8, 3.5], [12.8, 12.5]].map(([cx, cy]) => svg("circle", { cx, cy, r: 1.7, fill: "currentColor", stroke: "none" })),
  );
}
