// The list of conversations: open, rename, export, delete.
//
// Owns the list and its buttons. Knows nothing of messages; what the buttons do is given.

import { $, el, iconButton } from "./dom.js";
import { conversation, conversations, exported, remove, save } from "./store.js";

export class Sidebar {
  #actions;
  #current = null;

  /** `actions`: open(id), deleted(conversation), busy(id) and failed(), by name. */
  constructor(actions) {
    this.#actions = actions;
    $("open-sidebar").addEventListener("click", () => this.toggle(true));
    $("close-sidebar").addEventListener("click", () => this.toggle(false));
    $("scrim").addEventListener("click", () => this.toggle(false));
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
    $("conversations").replaceChildren(...conversations().map((kept) => this.#row(kept)));
  }

  #row(kept) {
    const open = el(
      "button",
      {
        type: "button",
        class: "title",
        title: kept.title,
        "aria-current": kept.id === this.#current ? "page" : null,
        onclick: () => this.#actions.open(kept.id),
        ondblclick: () => this.#rename(kept, row),
      },
      kept.title,
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
    const input = el("input", { "aria-label": "Title", maxlength: 120, value: title });
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
