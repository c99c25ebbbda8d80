// The messages of a conversation on the page.
//
// Owns their list, and the scrolling around it. message.js makes each of them.

import { AnswerView, userMessage } from "./message.js";

const LIMIT_NEAR = 40; // pixels from the end that still count as the end

/** The list of messages, and the scrolling around it. */
export class Thread {
  #views = new Map();
  #follows = true;
  #list;
  #scroller;
  #toEnd;

  /**
   * `parts`: the elements {list, scroller, toEnd}. `actions`: again, edit, turn, new and settings,
   * by name. `context()`: the model's context in tokens, or null.
   */
  constructor({ list, scroller, toEnd }, settings, actions, context) {
    this.#list = list;
    this.#scroller = scroller;
    this.#toEnd = toEnd;
    this.settings = settings;
    this.actions = actions;
    this.context = context;
    this.folds = new WeakMap(); // which messages the user folded or unfolded
    scroller.addEventListener("scroll", () => this.#onScroll());
    // Mathematics and fonts that arrive later change heights; who reads the end stays there.
    const observer = new ResizeObserver(() => (this.#follows ? this.toEnd() : this.#showWay()));
    for (const node of [scroller, list]) observer.observe(node);
    // What the user folds and unfolds stays where it is.
    list.addEventListener("click", () => (this.#follows = false), { capture: true });
    toEnd.addEventListener("click", () => this.toEnd("smooth"));
  }

  /** Show all messages, at their end. */
  show(messages) {
    this.#fill(messages);
    this.toEnd();
  }

  /** Show all messages after a switch at one of them, which stays in its place. */
  showAround(messages, at, selector) {
    const top = () => this.#list.children[at].getBoundingClientRect().top;
    const before = top();
    this.#fill(messages);
    this.#follows = false;
    this.#scroller.scrollTop += top() - before;
    const buttons = this.#list.children[at].querySelectorAll(".versions button:not(:disabled)");
    const same = [...buttons].find((button) => button.matches(selector));
    (same ?? buttons[0])?.focus({ preventScroll: true });
    this.#showWay();
  }

  /** Bring a message into view. */
  reveal(at) {
    this.#follows = false;
    this.#list.children[at]?.scrollIntoView({ block: "start", behavior: "instant" });
  }

  #fill(messages) {
    this.#views.clear();
    this.#list.replaceChildren(...messages.map((message) => this.#node(message)));
  }

  /** Show a message that has changed; who reads the end goes on reading it. */
  update(message) {
    this.#follows = this.#atEnd();
    this.#views.get(message)?.update();
    if (this.#follows) this.toEnd();
    else this.#showWay();
  }

  /** Go to the end. */
  toEnd(behavior = "instant") {
    this.#follows = true;
    this.#scroller.scrollTo({ top: this.#scroller.scrollHeight, behavior });
    this.#showWay();
  }

  #node(message) {
    if (message.role === "user") return userMessage(message, this);
    const view = new AnswerView(message, this);
    this.#views.set(message, view);
    return view.node;
  }

  #atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.#scroller;
    return scrollTop + clientHeight >= scrollHeight - LIMIT_NEAR;
  }

  #onScroll() {
    this.#follows = this.#atEnd();
    this.#showWay();
  }

  #showWay() {
    this.#toEnd.hidden = this.#atEnd();
  }
}
