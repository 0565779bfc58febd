// Makes elements from values. Text always stays text: no part of the page parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Options: `on` (listeners), `data`, `style` (CSS properties); all others are attributes. */
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
    else if (name === "style") for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

/** Make a table's head from the title and optional class of each column. */
export function thead(columns) {
  return h("thead", {}, h("tr", {}, columns.map(([text, kind]) => h("th", { scope: "col", class: kind ?? "" }, text))));
}

/** Make a table in a frame that scrolls and that the keyboard reaches. */
export function grid(options, ...parts) {
  return h("div", { class: "scroll", tabindex: "0" }, h("table", options, parts));
}

/** Make a panel: a header over its content. */
export function panel(options, head, ...content) {
  return h("section", { class: "panel", ...options }, h("header", {}, head), content);
}

/** Show a view: its panels, one below the other. */
export function showPanels(main, ...panels) {
  put(main, h("div", { class: "wrap" }, panels));
}

/** Replace an element's children. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

/** Set an element's text if it differs, to avoid needless layout on a live page. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show a message for a few seconds; screen readers read it too. */
export function toast(text, bad = false) {
  const note = h("div", { class: bad ? "toast bad" : "toast" }, text);
  document.getElementById("messages").append(note);
  setTimeout(() => note.remove(), bad ? 9000 : 4500);
}

/** Return an error notice that replaces a view. */
export function notice(error) {
  return h("div", { class: "notice", role: "alert" }, h("strong", {}, error.title ?? "Request failed"), h("p", {}, error.message));
}

const ICONS = {
  mark: "M3 8h4M7 8c2.6 0 1.4-4.5 5-4.5M7 8c2.6 0 1.4 4.5 5 4.5",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13.5 9.5A5.7 5.7 0 0 1 6.5 2.5a5.7 5.7 0 1 0 7 7Z",
  auto: "M8 2a6 6 0 1 0 0 12V2Z",
  close: "M4 4l8 8M12 4l-8 8",
  fork: "M8 14V9M8 9 4 5M8 9l4-4M4 8V4.5h3.5M12 8V4.5H8.5",
  find: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9ZM10.3 10.3 14 14",
  fit: "M2 6V2h4M10 2h4v4M14 10v4h-4M6 14H2v-4",
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
