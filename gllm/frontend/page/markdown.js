// Markdown of an answer: blocks, and their nodes. HTML in it stays text.
//
// Owns the block syntax, and how a growing text is shown anew without touching what is done. Knows
// nothing of messages.

import { copyButton, el } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(\s+|$)(.*)$/;
const DIVIDER = /^:?-+:?$/;
const DEEPEST = 8;

/** Shows a text in an element; blocks that did not change keep their nodes. */
export class Markdown {
  #container;
  #sources = [];

  constructor(container) {
    this.#container = container;
  }

  /** Show a text, mostly a longer one than before. */
  show(text) {
    const blocks = parse(text.replace(/\r\n?/g, "\n").split("\n"));
    let same = 0;
    while (same < blocks.length && this.#sources[same] === blocks[same].source) same++;
    while (this.#container.childNodes.length > same) this.#container.lastChild.remove();
    this.#container.append(...blocks.slice(same).map((block) => block.node()));
    this.#sources = blocks.map((block) => block.source);
  }
}

/** The blocks of lines: what each was written as, and how to make its node. */
function parse(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [node, end] = read(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), node });
    at = end;
  }
  return blocks;
}

/** The block that begins at a line: how to make its node, and the first line behind it. */
function read(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    // The page has headings of its own above those of an answer.
    const tag = `h${Math.min(6, heading[1].length + 2)}`;
    return [() => el(tag, {}, ...inline(heading[2].trim())), at + 1];
  }
  if (RULE.test(line)) return [() => el("hr"), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at);
}

function fence(lines, at) {
  const [, marks, info] = FENCE.exec(lines[at]);
  const indent = /^ */.exec(lines[at])[0].length;
  const closes = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closes.test(lines[end])) end++;
  const inner = lines.slice(at + 1, end).map((line) => dedent(line, indent));
  const text = inner.join("\n");
  const language = info.trim().split(/\s/)[0];
  const node = () => {
    const name = el("span", {}, language || "text");
    const caption = el("figcaption", {}, name, copyButton("Copy the code", () => text));
    const code = el("pre", { tabindex: 0 }, el("code", {}, text));
    return el("figure", { class: "code" }, caption, code);
  };
  return [node, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || continues(lines, end))) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [() => el("blockquote", {}, ...nodes(inner, depth + 1)), end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const base = first[1].length;
  const ordered = first[3] !== undefined;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    const belongs = item && item[1].length < base + 2 && (item[3] !== undefined) === ordered;
    if (!belongs || RULE.test(lines[end])) break;
    const next = itemEnd(lines, end + 1, base);
    const width = item[1].length + item[2].length + Math.min(item[4].length || 1, 4);
    const rest = lines.slice(end + 1, next).map((line) => dedent(line, width));
    items.push([item[5], ...rest]);
    end = next;
  }
  const start = ordered && first[3] !== "1" ? Number(first[3]) : null;
  const make = (item) => el("li", {}, ...tight(nodes(item, depth + 1)));
  return [() => el(ordered ? "ol" : "ul", { start }, ...items.map(make)), end];
}

/** Where an item ends: at the next item, or at a line behind a gap that is not indented. */
function itemEnd(lines, from, base) {
  let end = from;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const indent = /^ */.exec(line)[0].length;
    const goesOn = continues(lines, end) && lines[end - 1].trim() && !ITEM.test(line);
    if (line.trim() && indent < base + 2 && !goesOn) break;
  }
  while (end > from && !lines[end - 1].trim() && !ITEM.test(lines[end] ?? "")) end--;
  return end;
}

/** The nodes of an item; what would be a paragraph alone stands in the item itself. */
function tight(made) {
  const [first, ...rest] = made;
  return first?.tagName === "P" ? [...first.childNodes, ...rest] : made;
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const divider = cells(lines[at + 1]);
  const divides = divider.every((cell) => DIVIDER.test(cell));
  return divides && divider.length === cells(lines[at]).length;
}

function table(lines, at) {
  const aligned = cells(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return "left";
  });
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const row = (line, tag) => {
    const found = cells(line);
    const make = (align, i) => el(tag, { class: align }, ...inline(found[i] ?? ""));
    return el("tr", {}, ...aligned.map(make));
  };
  const node = () => {
    const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
    const head = el("thead", {}, row(lines[at], "th"));
    return el("div", { class: "table" }, el("table", {}, head, el("tbody", {}, ...body)));
  };
  return [node, end];
}

/** The texts of a row's cells. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  const split = inner.match(/(?:\\.|[^|\\])+|\|/g) ?? [];
  const found = [""];
  for (const part of split) {
    if (part === "|") found.push("");
    else found[found.length - 1] += part;
  }
  return found.map((cell) => cell.trim());
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && continues(lines, end) && !isTable(lines, end)) end++;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [() => el("p", {}, ...inline(text)), end];
}

/** Whether a line goes on with the paragraph before it. */
function continues(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  const begins = item && item[5] && (item[3] === undefined || item[3] === "1");
  const other = [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line));
  return line.trim() !== "" && !begins && !other;
}

function nodes(lines, depth) {
  return parse(lines, depth).map((block) => block.node());
}

function dedent(line, width) {
  const indent = /^ */.exec(line)[0].length;
  return line.slice(Math.min(indent, width));
}
