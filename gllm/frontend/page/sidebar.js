// The list of conversations: search, open, rename, export, import, delete.
//
// Owns the list and its buttons. Knows nothing of messages; what the buttons do is given.

import { $, el, iconButton } from "./dom.js";
import { exported, imported } from "./exchange.js";
import { match, wordsOf } from "./search.js";
import { conversation, conversations, remove, save } from "./store.js";
import { toast } from "./widgets.js";

export class Sidebar {
  #actions;
  #current = null;

  /**
   * `actions`: open(id, at) with the position of a message or -1, add(conversation) which is false
   * where it does not fit, renamed(id, title), deleted(conversation), busy(id) and failed(), by name.
   */
  constructor(actions) {
    this.#actions = actions;
    $("open-sidebar").addEventListener("click", () => this.toggle(true));
    $("close-sidebar").addEventListener("click", () => this.toggle(false));
    $("scrim").addEventListener("click", () => this.toggle(false));
    $("search").addEventListener("input", () => this.show());
    $("search").addEventListener("keydown", (event) => this.#onSearchKey(event));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import());
  }

  /** On a narrow page the list lies over the messages. */
  toggle(open) {
    document.body.classList.toggle("sidebar-open", open);
    $("open-sidebar").setAttribute("aria-expanded", open);
    (open ? $("close-sidebar") : $("open-sidebar")).focus();
  }

  get isOpen() {
    return document.body.classList.contains("sidebar-open");
  }

  /** Show the list, with one of them marked. */
  show(current = this.#current) {
    this.#current = current;
    const kept = conversations();
    const words = wordsOf($("search").value);
    const found = kept.map((one) => [one, match(one, words)]).filter(([, hit]) => hit);
    $("conversations").replaceChildren(...found.map(([one, hit]) => this.#row(one, hit)));
    $("found").textContent = words.length ? `${found.length} of ${kept.length} conversations` : "";
    $("found").hidden = !words.length;
    $("search").hidden = !kept.length;
  }

  #onSearchKey(event) {
    if (event.key === "Escape") {
      // What Esc does elsewhere on the page is not meant.
      event.stopPropagation();
      $("search").value = "";
      this.show();
    } else if (event.key === "Enter") {
      $("conversations").querySelector(".title")?.click();
    }
  }

  /** Add the conversations of the chosen files, and open the last one. */
  async #import() {
    const files = [...$("import-file").files];
    $("import-file").value = ""; // The same file can be chosen again.
    let last = null;
    for (const file of files) {
      try {
        const added = await imported(file);
        if (!this.#actions.add(added)) return;
        last = added;
      } catch (error) {
        toast(`${file.name} is not an exported conversation: ${error.message}`);
      }
    }
    if (last) this.#actions.open(last.id, -1);
    else this.show();
  }

  #row(kept, { piece, at }) {
    const open = el(
      "button",
      {
        type: "button",
        class: "title",
        dir: "auto",
        title: kept.title,
        "aria-current": kept.id === this.#current ? "page" : null,
        onclick: () => this.#actions.open(kept.id, at),
        ondblclick: () => this.#rename(kept, row),
      },
      kept.title,
      piece ? el("small", { dir: "auto" }, piece) : null,
    );
    const tools = el(
      "div",
      { class: "tools" },
      iconButton("edit", `Rename “${kept.title}”`, () => this.#rename(kept, row)),
      iconButton("export", `Export “${kept.title}” as JSON`, () => download(kept)),
      iconButton("delete", `Delete “${kept.title}”`, () => this.#delete(kept)),
    );
    const row = el("li", { class: this.#actions.busy(kept.id) ? "busy" : null }, open, tools);
    return row;
  }

  #rename({ id, title }, row) {
    const input = el("input", { "aria-label": "Title", dir: "auto", maxlength: 120, value: title });
    let done = false;
    const end = (takes) => {
      if (done) return;
      done = true;
      const kept = conversation(id);
      const chosen = input.value.trim();
      if (kept && takes && chosen) {
        this.#actions.renamed(id, chosen);
        if (!save({ ...kept, title: chosen })) this.#actions.failed();
      }
      this.show();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      else if (event.key === "Escape") end(false);
      else return;
      event.stopPropagation();
      event.preventDefault();
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.select();
  }

  #delete(kept) {
    remove(kept.id);
    this.#actions.deleted(kept);
    this.show();
  }
}

/** Give a conversation to the user as a file. */
function download(kept) {
  const url = URL.createObjectURL(new Blob([exported(kept)], { type: "application/json" }));
  const name = kept.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  el("a", { href: url, download: `${name || "conversation"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
