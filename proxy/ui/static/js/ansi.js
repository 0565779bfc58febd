// Terminal output as elements: colours and weights are rendered, and every other control sequence is made visible.

import { h } from "./dom.js";
import { symbol } from "./format.js";

// Alternatives in order: a colour or weight; any other escape sequence (up to a letter, or a string up to BEL or ESC \);
// a control character; a character that changes the direction of text.
// eslint-disable-next-line no-control-regex
const TOKEN = /\u001b\[([0-9;:]*)m|\u001b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\^_a-z])|[\u0000-\u0008\u000b-\u001f\u007f-\u009f]|[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const MAX_PIECES = 4000;

/** Return terminal output as nodes. After 4,000 pieces the rest is plain text, because each piece is an element. */
export function terminalText(text) {
  const pieces = [];
  let style = {};
  let from = 0;
  const plain = text.replaceAll("\r\n", "\n");
  for (const match of plain.matchAll(TOKEN)) {
    if (pieces.length > MAX_PIECES) break;
    if (match.index > from) pieces.push(piece(plain.slice(from, match.index), style));
    from = match.index + match[0].length;
    if (match[1] !== undefined) style = restyle(style, match[1]);
    else pieces.push(h("span", { class: "ctl", title: "control characters" }, [...match[0]].map(symbol2).join("")));
  }
  if (from < plain.length) pieces.push(piece(plain.slice(from), style));
  return pieces;
}

function symbol2(character) {
  const code = character.codePointAt(0);
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x200e && code <= 0x2069) ? symbol(character) : character;
}

function piece(text, style) {
  const classes = [style.b && "a-b", style.d && "a-d", style.i && "a-i", style.u && "a-u", style.s && "a-s", typeof style.f === "number" && `f-${style.f}`, typeof style.g === "number" && `b-${style.g}`].filter(Boolean);
  const colours = {};
  if (typeof style.f === "string") colours.color = style.f;
  if (typeof style.g === "string") colours["background-color"] = style.g;
  return classes.length || Object.keys(colours).length ? h("span", { class: classes.join(" ") || null, style: colours }, text) : text;
}

function restyle(style, codes) {
  const numbers = codes === "" ? [0] : codes.split(/[;:]/).map(Number);
  let next = { ...style };
  for (let i = 0; i < numbers.length; i++) {
    const n = numbers[i];
    if (n === 0) next = {};
    else if (n >= 1 && n <= 4) next["bdiu"[n - 1]] = true;
    else if (n === 9) next.s = true;
    else if (n === 22) next.b = next.d = false;
    else if (n === 23) next.i = false;
    else if (n === 24) next.u = false;
    else if (n === 29) next.s = false;
    else if ((n >= 30 && n <= 37) || (n >= 90 && n <= 97)) next.f = n % 10;
    else if ((n >= 40 && n <= 47) || (n >= 100 && n <= 107)) next.g = n % 10;
    else if (n === 39) delete next.f;
    else if (n === 49) delete next.g;
    else if (n === 38 || n === 48) {
      const name = n === 38 ? "f" : "g";
      if (numbers[i + 1] === 5) [next[name], i] = [palette(numbers[i + 2]), i + 2];
      else if (numbers[i + 1] === 2) [next[name], i] = [rgb(numbers.slice(i + 2, i + 5)), i + 4];
    }
  }
  return next;
}

function palette(n) {
  if (!(n >= 0 && n <= 255)) return undefined;
  if (n < 16) return n % 8;
  if (n >= 232) return rgb([1, 1, 1].map(() => 8 + (n - 232) * 10));
  const step = (value) => (value ? 55 + value * 40 : 0);
  return rgb([Math.floor((n - 16) / 36), Math.floor((n - 16) / 6) % 6, (n - 16) % 6].map(step));
}

const rgb = (parts) => (parts.length === 3 && parts.every((part) => part >= 0 && part <= 255) ? `rgb(${parts.map(Number).join(" ")})` : undefined);
