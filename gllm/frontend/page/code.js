// Syntax highlighting of code blocks, by highlight.js.
//
// Owns the languages and when their grammars are loaded.

import { el } from "./dom.js";
import highlighter from "./vendor/highlight/core.min.js";

const LONGEST = 30_000; // characters; a longer block stays plain, so that the page stays quick
const ALIASES = {
  bash: ["sh", "zsh"],
  c: ["h"],
  cpp: ["c++", "cc", "cxx", "hpp", "cuda", "cu"],
  csharp: ["cs", "c#"],
  css: ["scss"],
  diff: ["patch"],
  dockerfile: ["docker"],
  go: ["golang"],
  haskell: ["hs"],
  ini: ["toml", "conf"],
  java: [],
  javascript: ["js", "jsx", "mjs"],
  json: ["jsonc", "json5", "jsonl"],
  julia: ["jl"],
  kotlin: ["kt"],
  latex: ["tex"],
  lua: [],
  makefile: ["make", "mk"],
  markdown: ["md"],
  perl: ["pl"],
  php: [],
  powershell: ["ps1", "pwsh"],
  python: ["py", "python3", "ipython", "pycon"],
  r: [],
  ruby: ["rb"],
  rust: ["rs"],
  scala: [],
  shell: ["console", "shellsession"],
  sql: ["postgresql", "mysql", "sqlite"],
  swift: [],
  typescript: ["ts", "tsx"],
  xml: ["html", "svg", "xhtml", "vue"],
  yaml: ["yml"],
};
const EMBEDDED = {
  javascript: ["xml"],
  markdown: ["xml"],
  shell: ["bash"],
  typescript: ["xml"],
  xml: ["css", "javascript"],
};
const NAMES = new Map(
  Object.entries(ALIASES).flatMap(([name, others]) => [name, ...others].map((one) => [one, name])),
);

/** Receives what highlight.js finds as nodes; its own emitter makes markup, as text. */
class NodeEmitter {
  root = el("span");
  #open = [this.root];

  addText(text) {
    if (text) this.#open.at(-1).append(text);
  }

  openNode(scope) {
    const node = el("span", { class: `code-${scope.split(".")[0]}` });
    this.#open.at(-1).append(node);
    this.#open.push(node);
  }

  closeNode() {
    if (this.#open.length > 1) this.#open.pop();
  }

  startScope(scope) {
    this.openNode(scope);
  }

  endScope() {
    this.closeNode();
  }

  __addSublanguage(emitter) {
    this.#open.at(-1).append(emitter.root);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

highlighter.configure({ __emitter: NodeEmitter });

const loads = new Map();

/** Register a language and those within it; once. */
function load(name) {
  if (!loads.has(name)) {
    const load = async () => {
      const grammar = await import(`./vendor/highlight/languages/${name}.min.js`);
      highlighter.registerLanguage(name, grammar.default);
    };
    // A failure, such as a server that restarts, is not the last word.
    loads.set(name, load().catch(() => loads.delete(name)));
  }
  return loads.get(name);
}

/** Highlight the text of a code element, which it already shows, in a language named by a model. */
export function highlight(code, text, language) {
  const name = NAMES.get(language.toLowerCase());
  if (name === undefined || text.length > LONGEST) return;
  const fill = () => {
    if (!highlighter.getLanguage(name)) return;
    const result = highlighter.highlight(text, { language: name, ignoreIllegals: true });
    code.replaceChildren(...result._emitter.root.childNodes);
  };
  const needed = [name, ...(EMBEDDED[name] ?? [])];
  if (needed.every((one) => highlighter.getLanguage(one))) fill();
  else Promise.all(needed.map(load)).then(fill);
}
