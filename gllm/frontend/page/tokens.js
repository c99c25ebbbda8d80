// From markdown-it's tokens to nodes. No text ever becomes markup.
//
// Owns which element each token becomes. markdown.js decides which tokens to show.

import { highlight } from "./code.js";
import { copyButton, el } from "./dom.js";
import { formula } from "./formula.js";

const TAGS = { s: "del" };
const SAFE = /^(https?:|mailto:)/i;

/** Whether a link may lead to an address. */
export const isSafe = (url) => SAFE.test(url);

/** The nodes of a flat list of tokens. A growing block is shown without highlighting. */
export function toNodes(tokens, isGrowing = false) {
  const root = el("div");
  const open = [root];
  for (const token of tokens) {
    // The paragraphs of tight lists.
    if (token.hidden) continue;
    if (token.nesting < 0) {
      open.pop();
      // Blocks within a block have its direction; the stylesheet gives each of their lines its own.
      // Set when all is in it: browsers look for the first letter again with every node.
      if (open.length === 1 && token.block) root.lastChild.setAttribute("dir", "auto");
    } else if (token.nesting > 0) {
      const [outer, inner] = opened(token);
      open.at(-1).append(outer);
      open.push(inner);
    } else {
      open.at(-1).append(...leaf(token, isGrowing, open));
    }
  }
  return [...root.childNodes];
}

/** The element that a token opens: what is added, and what receives the tokens within. */
function opened(token) {
  switch (token.type) {
    case "heading_open": {
      // The page has headings of its own above those of an answer.
      const node = el(`h${Math.min(6, Number(token.tag[1]) + 2)}`);
      return [node, node];
    }
    case "table_open": {
      const node = el("table");
      return [el("div", { class: "table" }, node), node];
    }
    case "th_open":
    case "td_open": {
      const [, align] = /text-align:(\w+)/.exec(token.attrGet("style") ?? "") ?? [];
      const node = el(token.tag, { class: align });
      return [node, node];
    }
    case "ordered_list_open": {
      const node = el("ol", { start: token.attrGet("start") });
      return [node, node];
    }
    case "list_item_open": {
      const node = el("li", { class: token.meta?.isTask ? "task" : null });
      return [node, node];
    }
    case "link_open": {
      const node = anchor(token.attrGet("href"));
      return [node, node];
    }
    default: {
      const node = el(TAGS[token.tag] ?? token.tag);
      return [node, node];
    }
  }
}

/** The nodes of a token that encloses no others. */
function leaf(token, isGrowing, open) {
  switch (token.type) {
    case "inline":
      return toNodes(token.children);
    case "text":
      return [token.content];
    case "softbreak":
    case "hardbreak":
      return [el("br")];
    case "hr":
      return [el("hr")];
    case "code_inline":
      // Code and formulas say nothing about the direction of the text around them.
      return [el("code", { dir: "ltr" }, token.content)];
    case "task":
      return [taskBox(token.meta.isDone)];
    case "formula":
    case "formula_block":
      return [formula(token.content, token.meta.display)];
    case "formula_open":
      return [el("p", { dir: "ltr" }, token.content)];
    case "image":
      return image(token, open);
    case "fence":
    case "code_block":
      return [codeBlock(token, isGrowing)];
    default:
      return [token.content];
  }
}

function codeBlock(token, isGrowing) {
  const text = token.content.replace(/\n$/, "");
  const language = token.info.trim().split(/\s/)[0];
  const code = el("code", {}, text);
  if (language && !isGrowing) highlight(code, text, language);
  const caption = [el("span", {}, language || "text"), copyButton("Copy the code", () => text)];
  return el(
    "figure",
    { class: "code", dir: "ltr" },
    el("figcaption", {}, ...caption),
    el("pre", { tabindex: 0 }, code),
  );
}

/** The box of a task; it shows a state and cannot be changed. */
function taskBox(isDone) {
  const label = isDone ? "Done" : "Not done";
  return el("input", { type: "checkbox", disabled: true, "aria-label": label, checked: isDone });
}

/** An image is a link to it: to show it would tell others of the conversation. */
function image(token, open) {
  const address = token.attrGet("src");
  const label = token.content || address;
  const isLinked = open.some((node) => node.tagName === "A");
  return [isLinked ? label : anchor(address, label)];
}

function anchor(address, label = "") {
  const href = isSafe(address) ? address : null;
  return el("a", { href, target: "_blank", rel: "noopener noreferrer" }, label);
}
