// Folding of long messages.
//
// Owns which messages are long, and the button that folds and unfolds one.

import { el } from "./dom.js";

const LONG = {
  question: { characters: 1200, lines: 16, folded: true },
  // An answer is what one came for: it is shown whole until the user folds it.
  answer: { characters: 3000, lines: 40, folded: false },
};
const UNFOLD = "Show all";
const FOLD = "Show less";

/** A message's body that can be folded. */
export class Fold {
  #body;
  #message;
  #folds;
  #kind;

  /** `folds`: a WeakMap of what the user chose for each message. `kind`: question or answer. */
  constructor(body, message, folds, kind) {
    this.#body = body;
    this.#message = message;
    this.#folds = folds;
    this.#kind = LONG[kind];
    this.button = el("button", {
      type: "button",
      class: "link fold",
      hidden: true,
      onclick: () => this.#toggle(),
    });
  }

  /** Show the button where the text is long. */
  show(text) {
    const { characters, lines } = this.#kind;
    const isLong = text.length > characters || text.split("\n").length > lines;
    this.button.hidden = !isLong;
    this.#apply(isLong && (this.#folds.get(this.#message) ?? this.#kind.folded));
  }

  #toggle() {
    const folded = !this.#body.classList.contains("folded");
    this.#folds.set(this.#message, folded);
    this.#apply(folded);
    // Folding removes what was on screen: the message's beginning comes into view.
    if (folded) this.#body.scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  #apply(folded) {
    this.#body.classList.toggle("folded", folded);
    this.button.textContent = folded ? UNFOLD : FOLD;
    this.button.setAttribute("aria-expanded", !folded);
  }
}
