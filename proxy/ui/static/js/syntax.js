// Colours of source text: comments, strings, numbers and keywords, by the extension of a file. Lines are coloured one by
// one, so a string over several lines is coloured on its first line only.

import { h } from "./dom.js";
import { visible } from "./format.js";

const C_LIKE = "break case catch class const continue default delete do else enum export extends extern false finally fn for func function if impl import in interface let match mod mut new nil null package private protected pub public return self static struct super switch this throw true try type typeof use var void while yield async await go defer range int long double float bool char string";
const LANGUAGES = {
  py: ["#", "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield"],
  sh: ["#", "if then elif else fi for in do done while until case esac function return export local readonly exit set unset source"],
  c: ["//", C_LIKE],
  sql: ["--", "select from where insert into values update set delete create table index view drop alter add column primary key not null and or in is like order by group having limit offset join left inner outer on as distinct union all case when then else end begin commit rollback"],
  conf: ["#", "true false null yes no"],
};
const BY_EXTENSION = {
  py: "py", pyi: "py", sh: "sh", bash: "sh", Makefile: "sh", Dockerfile: "sh", js: "c", mjs: "c", ts: "c", tsx: "c", jsx: "c", c: "c", h: "c", cc: "c", cpp: "c", hpp: "c", java: "c",
  rs: "c", go: "c", cs: "c", swift: "c", kt: "c", sql: "sql", toml: "conf", ini: "conf", cfg: "conf", yml: "conf", yaml: "conf", json: "conf",
};
const MOST = 2000;

/** Return the language of a file by its name; undefined for one without colours. */
export const languageOf = (path) => BY_EXTENSION[path.split("/").at(-1).split(".").at(-1)];

/** Return a line as texts and coloured elements. */
export function coloured(line, language) {
  if (!language || line.length > MOST) return [visible(line)];
  const [comment, words] = LANGUAGES[language];
  const keywords = new Set(words.split(" "));
  const escaped = comment.replaceAll("/", "\\/");
  const tokens = new RegExp(`(${escaped}.*$)|("(?:[^"\\\\]|\\\\.)*"|'(?:[^'\\\\]|\\\\.)*')|\\b(\\d[\\w.]*)\\b|\\b([A-Za-z_]\\w*)\\b`, "g");
  const pieces = [];
  let from = 0;
  for (const match of line.matchAll(tokens)) {
    const kind = match[1] ? "y-c" : match[2] ? "y-s" : match[3] ? "y-n" : keywords.has(language === "sql" ? match[4].toLowerCase() : match[4]) ? "y-k" : null;
    if (!kind) continue;
    pieces.push(visible(line.slice(from, match.index)), h("span", { class: kind }, visible(match[0])));
    from = match.index + match[0].length;
  }
  pieces.push(visible(line.slice(from)));
  return pieces;
}
