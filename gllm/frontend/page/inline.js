// Markdown within a line: code, emphasis, links. Nodes are made, never markup.
//
// Owns the inline syntax. Knows nothing of blocks.

import { el } from "./dom.js";

const TARGET = /[^\s<>()]+(?:\([^\s<>()]*\)[^\s<>()]*)*/.source;
const LINK = new RegExp(`!?\\[([^[\\]\\n]*)\\]\\(<?(${TARGET})>?(?:\\s+"[^"\\n]*")?\\s*\\)`, "y");
const ADDRESS = /<?(https?:\/\/[^\s<>]*[^\s<>.,:;!?'"()[\]{}*_~`])>?/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const TICKS = /`+/y;
const SAFE = /^(https?:|mailto:)/i;
const WORD = /[\p{L}\p{N}]/u;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const DEEPEST = 8;

/** The nodes and strings that a text stands for. */
export function inline(text, depth = 0) {
  const out = [];
  const dead = new Set(); // marks that nothing behind this point closes
  let plain = "";
  let at = 0;
  const put = (node, end) => {
    if (plain) out.push(plain);
    plain = "";
    out.push(node);
    at = end;
  };
  while (at < text.length) {
    const found = special(text, at, depth, dead);
    if (found === null) plain += text[at++];
    else if (typeof found.node === "string") [plain, at] = [plain + found.node, found.end];
    else put(found.node, found.end);
  }
  if (plain) out.push(plain);
  return out;
}

/** What stands at a position other than a plain character: {node, end}, or null. */
function special(text, at, depth, dead) {
  switch (text[at]) {
    case "\n":
      return { node: el("br"), end: at + 1 };
    case "\\": {
      const match = matchAt(ESCAPED, text, at);
      return match && { node: match[1], end: ESCAPED.lastIndex };
    }
    case "`":
      return code(text, at, dead);
    case "!":
    case "[":
      return link(text, at, depth);
    case "<":
    case "h":
      return address(text, at);
    case "*":
    case "_":
    case "~":
      return depth < DEEPEST ? emphasis(text, at, depth, dead) : null;
    default:
      return null;
  }
}

function code(text, at, dead) {
  const ticks = matchAt(TICKS, text, at)[0];
  const literal = { node: ticks, end: at + ticks.length };
  if (dead.has(ticks)) return literal;
  for (let end = literal.end; ; ) {
    end = text.indexOf(ticks, end);
    if (end < 0) {
      dead.add(ticks);
      return literal;
    }
    const run = matchAt(TICKS, text, end)[0].length;
    if (run === ticks.length) {
      const inner = text.slice(literal.end, end).replaceAll("\n", " ");
      const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
      return { node: el("code", {}, padded ? inner.slice(1, -1) : inner), end: end + run };
    }
    end += run;
  }
}

function link(text, at, depth) {
  const match = matchAt(LINK, text, at);
  if (!match || !SAFE.test(match[2])) return null;
  // Within a link, no other one; an image is not fetched, its address is shown as a link.
  const label = match[1] ? inline(match[1], DEEPEST) : [match[2]];
  return { node: anchor(match[2], label), end: at + match[0].length };
}

function address(text, at) {
  if (text[at] === "h" && at > 0 && WORD.test(text[at - 1])) return null;
  const match = matchAt(ADDRESS, text, at);
  return match && { node: anchor(match[1], [match[1]]), end: at + match[0].length };
}

function anchor(href, children) {
  return el("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function emphasis(text, at, depth, dead) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || dead.has(mark)) continue;
    if (mark[0] === "_" && at > 0 && WORD.test(text[at - 1])) continue;
    const begin = at + mark.length;
    if (begin >= text.length || /\s/.test(text[begin])) continue;
    const end = closing(text, begin, mark);
    if (end < 0) {
      dead.add(mark);
      continue;
    }
    const inner = inline(text.slice(begin, end), depth + 1);
    return { node: el(tag, {}, ...inner), end: end + mark.length };
  }
  return null;
}

/** Where the mark that closes an emphasis stands; -1 where none does. */
function closing(text, begin, mark) {
  for (let end = begin + 1; (end = text.indexOf(mark, end)) >= 0; ) {
    let run = mark.length;
    while (text[end + run] === mark[0]) run++;
    const after = text[end + run] ?? "";
    const closes = !/\s/.test(text[end - 1]) && !(mark[0] === "_" && WORD.test(after));
    // A run of two within a single mark is a bold part of its own.
    if (closes && (mark.length === 2 || run !== 2)) return end + run - mark.length;
    end += run;
  }
  return -1;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}
