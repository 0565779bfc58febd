// Formats numbers, times and calls for people.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (n) => whole.format(n);

/** 950 → "950", 12,345 → "12.3 k". */
export function short(n) {
  if (n < 10_000) return count(n);
  return n < 999_500 ? `${(n / 1000).toPrecision(3)} k` : `${(n / 1e6).toPrecision(3)} M`;
}

/** Seconds in the unit that fits: "840 µs", "12 ms", "4.31 s", "12 min 05 s", "3 h 12 min". */
export function seconds(s) {
  if (!s) return "0 s";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.9995) return `${(s * 1000).toPrecision(s < 0.01 ? 2 : 3).replace(/\.0+$/, "")} ms`;
  if (s < 99.95) return `${s.toPrecision(3)} s`;
  const rounded = Math.round(s);
  if (rounded < 3600) return `${Math.floor(rounded / 60)} min ${String(rounded % 60).padStart(2, "0")} s`;
  if (rounded >= 86_400) return `${(s / 86_400).toPrecision(3)} d`;
  return `${Math.floor(rounded / 3600)} h ${String(Math.floor((rounded % 3600) / 60)).padStart(2, "0")} min`;
}

export function bytes(n) {
  if (n < 1024) return `${n} B`;
  const power = Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${(n / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const percent = (x) => `${(x * 100).toFixed(x > 0 && x < 0.1 ? 1 : 0)} %`;

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** Return a time of the proxy, such as "2026-11-22T21:28:03.125042Z", in seconds since 1970. `Date` would cut it to milliseconds. */
export const unix = (time) => Date.parse(`${time.slice(0, 19)}Z`) / 1000 + Number(`0${time.slice(19, -1)}`);

export function ago(time) {
  const s = Math.max(0, Date.now() / 1000 - unix(time));
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return s < 86_400 ? `${Math.floor(s / 3600)} h ago` : `${Math.floor(s / 86_400)} d ago`;
}

export const moment = (time) => new Date(time).toLocaleString("sv-SE");

/** Return a call in one line: the command or statement, or else the tool and its arguments. */
export function line(call) {
  if (!call) return "start";
  return oneLine(call.title);
}

/** Return text of several lines in one line. */
export const oneLine = (text) => visible(text.replace(/\s+/g, " ").trim());

/** Make control characters and characters that change the text direction visible. */
export function visible(text) {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, symbol);
}

export function symbol(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return code === 0x7f ? "␡" : `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}
