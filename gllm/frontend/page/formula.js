// Mathematics: its syntax within Markdown, and its layout by KaTeX.
//
// Owns the delimiters, the limits, and when KaTeX is loaded. What a model writes is untrusted: a
// formula can neither link, load nor style anything, and its size is bounded.

import { el } from "./dom.js";

const PAIRS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];
const BLOCKS = PAIRS.slice(0, 2);
// Environments that stand without delimiters: those that KaTeX lays out. They may hold themselves.
const ENVIRONMENT = new RegExp(
  "^\\\\begin\\{((?:align(?:ed|at|edat)?|gather(?:ed)?|equation|split|[dr]?cases|drcases|CD|d?array|" +
    "subarray|[pbBvV]?matrix|smallmatrix)\\*?)\\}",
);
const CHEMISTRY = /^\\(?:ce|pu)\{/; // may stand without delimiters too
const USES_CHEMISTRY = /\\(?:ce|pu)(?![a-zA-Z])/;
const PIECE = /\\(begin|end)\{([a-zA-Z]+\*?)\}|\\(?:ce|pu)\{|\\[^\n]|[{}\n]/g;
const LONGEST = 4000; // characters of a formula; a longer one is shown as it is written
const MAX_EXPAND = 4000; // what KaTeX's own macros take, for a formula full of them
// Each expansion of a macro that a formula defines can insert as much text as a formula holds.
const MAX_EXPAND_OF_DEFINITIONS = 20;
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand)(?![a-zA-Z])/;
const MAX_LINES_BEFORE = 50; // of a paragraph, searched for a formula that is open
const CACHE_SIZE = 300;
const LONGEST_BEGIN = 24; // characters of the longest opening delimiter, and more
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

/** The delimiters that a text begins with: {open, close, isKept, nests}, or undefined. */
function delimitersOf(text, pairs) {
  const pair = pairs.find(([open]) => text.startsWith(open));
  if (pair !== undefined) return { open: pair[0], close: pair[1], isKept: false, nests: false };
  const [open, name] = ENVIRONMENT.exec(text) ?? [];
  if (name === undefined) return undefined;
  return { open, close: `\\end{${name}}`, isKept: true, nests: true };
}

/** The formula that begins at the parser's position: {tex, display, end}, or null. */
function formulaAt(state) {
  const { src: text, pos: at, posMax: max } = state;
  const start = text.slice(at, at + LONGEST_BEGIN);
  const isChemical = CHEMISTRY.test(start);
  if (isChemical || ENVIRONMENT.test(start)) {
    state.ends ??= endsIn(text);
    const end = state.ends.get(at) ?? Infinity;
    if (end > Math.min(max, at + LONGEST)) return null;
    return { tex: text.slice(at, end), display: !isChemical, end };
  }
  const found = delimitersOf(start, PAIRS);
  if (found === undefined) return null;
  const { open, close } = found;
  const begin = at + open.length;
  // What closes nothing behind this point closes nothing behind a later one.
  const dead = (state.neverClosed ??= new Set());
  if (dead.has(close)) return null;
  if (!text.includes(close, begin)) {
    dead.add(close);
    return null;
  }
  const { end } = closing(text, begin, found, Math.min(max, begin + LONGEST));
  if (end < 0) return null;
  const tex = text.slice(begin, end);
  if (!tex.trim()) return null;
  if (open === "$" && !isSingle(text, at, end)) return null;
  return { tex, display: open === "$$" || open === "\\[", end: end + close.length };
}

/**
 * Where the environments and the chemical formulas of a text end, by where they begin. The braces
 * of a chemical formula are on one line. Read once for all of them: the text may be hostile.
 */
function endsIn(text) {
  const ends = new Map();
  const environments = new Map(); // where those of a name begin that are open
  let braces = []; // where these, or the macros before them, begin
  for (const { 0: piece, 1: which, 2: name, index } of text.matchAll(PIECE)) {
    const end = index + piece.length;
    if (which === "begin") {
      if (!environments.has(name)) environments.set(name, []);
      environments.get(name).push(index);
    } else if (which === "end") ends.set(environments.get(name)?.pop(), end);
    else if (piece === "\n") braces = [];
    else if (piece === "}") ends.set(braces.pop(), end);
    else if (piece.endsWith("{") && piece !== "\\{") braces.push(index);
  }
  return ends;
}

/** Whether two dollar signs enclose a formula; "$5 and $10" are prices. */
function isSingle(text, at, end) {
  if (at > 0 && WORD.test(text[at - 1])) return false;
  const spaced = /\s/.test(text[at + 1]) || /\s/.test(text[end - 1]);
  return !spaced && !/[\d$]/.test(text[end + 1] ?? "");
}

/**
 * Where the delimiters close: {end, depth}. `end` is the position of the closing delimiter that no
 * backslash escapes, or -1; then `depth` says how many are open.
 */
function closing(text, begin, { open, close, nests }, max, depth = 1) {
  for (let at = begin; at < max; at++) {
    if (text.startsWith(close, at)) {
      if (--depth === 0) return { end: at, depth };
    } else if (nests && text.startsWith(open, at)) depth++;
    if (text[at] === "\\") at++;
  }
  return { end: -1, depth };
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
  const found = delimitersOf(first, BLOCKS);
  if (found === undefined) return false;
  const { open, close, isKept } = found;
  // Without this, many lines that open a formula would each search all those behind.
  const openUntil = (state.env.openUntil ??= {});
  if (startLine < openUntil[close]) return false;
  if (silent && isKept && isInFormula(state, startLine)) return false;
  const lines = [];
  let [at, depth] = [startLine, 1];
  for (let length = 0; at < endLine && length <= LONGEST; at++) {
    if (at > startLine && (state.isEmpty(at) || state.sCount[at] < state.blkIndent)) break;
    const text = at === startLine ? first.slice(open.length) : line(at);
    let end;
    ({ end, depth } = closing(text, 0, found, text.length, depth));
    lines.push(end < 0 ? text : text.slice(0, end));
    length += text.length + 1;
    if (end < 0) continue;
    if (text.slice(end + close.length).trim() || !lines.join("").trim()) return false;
    const tex = lines.join("\n");
    const whole = isKept ? open + tex + close : tex;
    if (!silent) push(state, "formula_block", whole, startLine, at + 1);
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

/** Whether the paragraph before a line has opened a formula that the line belongs to. */
function isInFormula(state, line) {
  const text = state.getLines(Math.max(state.line, line - MAX_LINES_BEFORE), line, 0, false);
  const opens = ([open, close]) =>
    open === close ? text.split(open).length % 2 === 0 : text.lastIndexOf(open) > text.lastIndexOf(close);
  return PAIRS.some(opens);
}

function push(state, type, content, from, to) {
  const token = state.push(type, "", 0);
  Object.assign(token, { block: true, content, map: [from, to], meta: { display: true } });
  state.line = to;
}

let katex = null;
let hasChemistry = false;
let loading = null;
let loadingChemistry = null;
const cache = new Map();

/** Load KaTeX. A classic script: it leaves its name in the global scope. */
function load() {
  loading ??= import("./vendor/katex/katex.min.js").then(() => {
    katex = globalThis.katex;
  });
  return loading;
}

/** Load KaTeX with its macros for chemistry. */
function loadChemistry() {
  loadingChemistry ??= load()
    .then(() => import("./vendor/katex/mhchem.min.js"))
    .then(() => (hasChemistry = true));
  return loadingChemistry;
}

/** The element of a formula. Until KaTeX is loaded, it shows the source. */
export function formula(tex, display) {
  const kind = display ? "formula display" : "formula";
  const node = el("span", { class: kind, dir: "ltr" }, tex);
  const fill = () => node.replaceChildren(laidOut(tex, display));
  // Most conversations need neither of them.
  const needsChemistry = USES_CHEMISTRY.test(tex);
  if (katex && (hasChemistry || !needsChemistry)) fill();
  else if (needsChemistry) loadChemistry().then(fill, () => (loading = loadingChemistry = null));
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
