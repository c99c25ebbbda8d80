// Markdown of an answer, read by markdown-it. HTML in it stays text.
//
// Owns the parser's options, and how a growing text is shown anew without touching what is done.

import { addFormulas } from "./formula.js";
import { addTasks } from "./tasks.js";
import { isSafe, toNodes } from "./tokens.js";
import MarkdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 40 });
parser.validateLink = isSafe;
// "main.py" is a file, not a host in Paraguay.
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
addFormulas(parser);
addTasks(parser);

/**
 * Shows a text in an element.
 *
 * Markdown is read line by line, so more text changes the last two blocks alone: the text before
 * them is parsed once. Definitions of links are the exception, and they make all of it be parsed again.
 */
export class Markdown {
  #container;
  #done = ""; // text of the blocks that no longer change
  #numDone = 0; // nodes of these
  #references = {}; // links defined in `#done`
  #defined = "{}"; // all links defined, as JSON
  #keys = []; // what each block behind `#done` was made of

  constructor(container) {
    this.#container = container;
  }

  /** Show a text, mostly a longer one than before; one that is not finished will be. */
  show(text, isFinished = true) {
    const lines = text.replace(/\r\n?/g, "\n");
    if (!lines.startsWith(this.#done)) this.#reset();
    let [blocks, defined] = this.#parse(lines, !isFinished);
    if (defined !== this.#defined) {
      this.#reset();
      [blocks, defined] = this.#parse(lines, !isFinished);
      this.#defined = defined;
    }
    this.#replace(blocks, isFinished);
    if (!isFinished) this.#finish(blocks, lines);
  }

  #reset() {
    this.#container.replaceChildren();
    [this.#done, this.#numDone, this.#references, this.#keys] = ["", 0, {}, []];
  }

  /** The blocks behind those that are done, and all definitions of links. */
  #parse(text, grows) {
    const rest = text.slice(this.#done.length);
    const env = { grows, references: { ...this.#references } };
    const blocks = [];
    let tokens = [];
    const parsed = parser.parse(rest, env);
    const lines = rest.split("\n");
    for (const token of parsed) {
      tokens.push(token);
      if (token.level > 0 || token.nesting > 0) continue;
      const [from, to] = tokens[0].map;
      blocks.push({ tokens, from, source: lines.slice(from, to).join("\n") });
      tokens = [];
    }
    return [blocks, JSON.stringify(env.references)];
  }

  /** Show blocks in the place of those before; the same ones keep their nodes. */
  #replace(blocks, isFinished) {
    const grows = (at) => !isFinished && at === blocks.length - 1 && isOpen(blocks[at]);
    const keys = blocks.map(({ source }, at) => `${grows(at)} ${source}`);
    let same = 0;
    while (same < keys.length && this.#keys[same] === keys[same]) same++;
    const kept = this.#numDone + same;
    while (this.#container.childNodes.length > kept) this.#container.lastChild.remove();
    const added = blocks.slice(same).map(({ tokens }, i) => toNodes(tokens, grows(same + i)));
    this.#container.append(...added.flat());
    this.#keys = keys;
  }

  /** Set aside all blocks that no longer change. */
  #finish(blocks, text) {
    // A line that is not complete, as "-", or a formula that is not closed, may turn out to be none
    // of its own: then it joins the block before.
    const numDone = blocks.length - 2;
    if (numDone < 1) return;
    const lines = text.slice(this.#done.length).split("\n").slice(0, blocks[numDone].from);
    const piece = lines.map((line) => `${line}\n`).join("");
    // For the definitions of links in it.
    parser.parse(piece, { references: this.#references });
    this.#done += piece;
    this.#numDone += numDone;
    this.#keys = this.#keys.slice(numDone);
  }
}

/** Whether a last block looks different while more of it may come. */
const isOpen = ({ tokens }) =>
  tokens.some(({ type }) => type === "fence" || type === "formula_open");
