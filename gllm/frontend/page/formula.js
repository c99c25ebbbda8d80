// Mathematics: its syntax within Markdown, and its layout by KaTeX.
//
// Owns the delimiters, the limits, and when KaTeX is loaded. What a model writes is untrusted: a
// formula can neither link, load nor style anything, and its size is bounded.

import { el } from "./dom.js";

const PAIRS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];
const BLOCKS = PAIRS.slice(0, 2);
const LONGEST = 4000; // characters of a formula; a longer one is shown as it is written
const MAX_EXPAND = 4000; // what KaTeX's own macros take, for a formula full of them
// Each expansion of a macro that a formula defines can insert as much text as a formula holds.
const MAX_EXPAND_OF_DEFINITIONS = 20;
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand)(?![a-zA-Z])/;
const CACHE_SIZE = 300;
const WORD = /[\p{L}\p{N}$]/u;

/** Teach a markdown-it parser formulas: tokens "formula", "formula_block" and "formula_open". */
export function addFormulas(parser) {
  parser.inline.ruler.before("escape", "formula", inlineRule);
  const alt = ["paragraph", "reference", "blockquote", "list"];
  parser.block.ruler.before("fence", "formula_block", blockRule, { alt });
}

function inlineRule(state, silent) {
  const found = formulaAt(state);
  if (found === null) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = found.tex;
    token.meta = { display: found.display };
  }
  state.pos = found.end;
  return true;
}

/** The formula that begins at the parser's position: {tex, display, end}, or null. */
function formulaAt(state) {
  const { src: text, pos: at, posMax: max } = state;
  const pair = PAIRS.find(([open]) => text.startsWith(open, at));
  if (pair === undefined) return null;
  const [open, close] = pair;
  const begin = at + open.length;
  // What closes nothing behind this point closes nothing behind a later one.
  const dead = (state.neverClosed ??= new Set());
  if (dead.has(close)) return null;
  if (!text.includes(close, begin)) {
    dead.add(close);
    return null;
  }
  const end = closing(text, begin, close, Math.min(max, begin + LONGEST));
  if (end < 0) return null;
  const tex = text.slice(begin, end);
  if (!tex.trim()) return null;
  if (open === "$" && !isSingle(text, at, end)) return null;
  return { tex, display: open === "$$" || open === "\\[", end: end + close.length };
}

/** Whether two dollar signs enclose a formula; "$5 and $10" are prices. */
function isSingle(text, at, end) {
  if (at > 0 && WORD.test(text[at - 1])) return false;
  const spaced = /\s/.test(text[at + 1]) || /\s/.test(text[end - 1]);
  return !spaced && !/[\d$]/.test(text[end + 1] ?? "");
}

/** The position of a closing delimiter that no backslash escapes, or -1. */
function closing(text, begin, close, max) {
  const first = text.indexOf(close, begin);
  if (first < 0 || first >= max) return -1;
  for (let at = begin; at < max; at++) {
    if (text.startsWith(close, at)) return at;
    if (text[at] === "\\") at++;
  }
  return -1;
}

/**
 * A formula on lines of its own, which may begin like those of a list. As in TeX, none of them is
 * blank. While a text grows (`env.grows`), one that is open at its end may still be closed: until
 * then all its lines are one block.
 */
function blockRule(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const first = line(startLine);
  const pair = BLOCKS.find(([open]) => first.startsWith(open));
  if (pair === undefined) return false;
  const [open, close] = pair;
  // Without this, many lines that open a formula would each search all those behind.
  const openUntil = (state.env.openUntil ??= {});
  if (startLine < openUntil[close]) return false;
  const lines = [];
  let at = startLine;
  for (let length = 0; at < endLine && length <= LONGEST; at++) {
    if (at > startLine && (state.isEmpty(at) || state.sCount[at] < state.blkIndent)) break;
    const text = at === startLine ? first.slice(open.length) : line(at);
    const end = closing(text, 0, close, text.length);
    lines.push(end < 0 ? text : text.slice(0, end));
    length += text.length + 1;
    if (end < 0) continue;
    if (text.slice(end + close.length).trim() || !lines.join("").trim()) return false;
    if (!silent) push(state, "formula_block", lines.join("\n"), startLine, at + 1);
    return true;
  }
  const isAtEnd = state.eMarks[at - 1] >= state.src.length - 1; // of the text, not of a quotation
  if (state.env.grows && isAtEnd) {
    if (!silent) push(state, "formula_open", open + lines.join("\n"), startLine, at);
    return true;
  }
  openUntil[close] = at;
  return false;
}

function push(state, type, content, from, to) {
  const token = state.push(type, "", 0);
  Object.assign(token, { block: true, content, map: [from, to], meta: { display: true } });
  state.line = to;
}

let katex = null;
let loading = null;
const cache = new Map();

function load() {
  // A classic script: it leaves its name in the global scope. Most conversations never need it.
  loading ??= import("./vendor/katex/katex.min.js").then(() => {
    katex = globalThis.katex;
  });
  return loading;
}

/** The element of a formula. Until KaTeX is loaded, it shows the source. */
export function formula(tex, display) {
  const node = el("span", { class: display ? "formula display" : "formula" }, tex);
  const fill = () => node.replaceChildren(laidOut(tex, display));
  if (katex) fill();
  else load().then(fill, () => (loading = null));
  return node;
}

function laidOut(tex, display) {
  const key = `${display} ${tex}`;
  if (!cache.has(key)) {
    // While an answer grows, its last paragraph is made anew in every frame.
    if (cache.size >= CACHE_SIZE) cache.clear();
    cache.set(key, makeNode(tex, display));
  }
  return cache.get(key).cloneNode(true);
}

function makeNode(tex, display) {
  try {
    if (tex.length > LONGEST) throw new RangeError("The formula is too long.");
    const tree = katex.__renderToDomTree(tex, {
      displayMode: display,
      trust: false,
      strict: "ignore",
      throwOnError: true,
      maxSize: 20,
      maxExpand: DEFINES.test(tex) ? MAX_EXPAND_OF_DEFINITIONS : MAX_EXPAND,
    });
    allowStyles(tree);
    return tree.toNode();
  } catch (error) {
    return el("code", { class: "broken", title: error.message }, tex);
  }
}

/** The page's policy refuses style attributes: set what they say through the object model. */
function allowStyles(tree) {
  const style = tree.attributes?.style;
  if (typeof style === "string") {
    delete tree.attributes.style;
    const toNode = tree.toNode;
    tree.toNode = () => {
      const node = toNode.call(tree);
      node.style.cssText = style;
      return node;
    };
  }
  for (const child of tree.children ?? []) allowStyles(child);
}
