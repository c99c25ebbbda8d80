// The messages of a conversation on the page.
//
// Owns their list, and the scrolling around it. message.js makes each of them.

import { AnswerView, userMessage } from "./message.js";

const LIMIT_NEAR = 40; // pixels from the end that still count as the end
const EXACT = 1; // pixels that fractions of a pixel add up to

/** The list of messages, and the scrolling around it. */
export class Thread {
  #views = new Map();
  #follows = true;
  #lastTop = 0; // of the scroller, at the last scroll event or jump
  #list;
  #scroller;
  #toEnd;

  /**
   * `parts`: the elements {list, scroller, toEnd}. `actions`: again, continue, edit, turn, new and
   * settings, by name. `context()`: the model's context in tokens, or null. `hasChoice()`: whether
   * there are several models.
   */
  constructor({ list, scroller, toEnd }, settings, actions, context, hasChoice) {
    this.#list = list;
    this.#scroller = scroller;
    this.#toEnd = toEnd;
    this.settings = settings;
    this.actions = actions;
    this.context = context;
    this.hasChoice = hasChoice;
    this.folds = new WeakMap(); // which messages the user folded or unfolded
    scroller.addEventListener("scroll", () => this.#onScroll());
    // Mathematics and fonts that arrive later change heights; who reads the end stays there.
    const observer = new ResizeObserver(() => (this.#follows ? this.toEnd() : this.#showWay()));
    for (const node of [scroller, list]) observer.observe(node);
    // What the user folds and unfolds stays where it is; see #readScroll().
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

  /** Show all messages anew, for what is around them has changed; each keeps its place. */
  refresh() {
    for (const view of this.#views.values()) view.update();
  }

  /** Show a message that has changed; who reads the end goes on reading it. */
  update(message) {
    this.#readScroll(); // The event of a scroll comes with the next frame.
    this.#views.get(message)?.update();
    if (this.#follows) this.toEnd();
    else this.#showWay();
  }

  /** Go to the end. */
  toEnd(behavior = "instant") {
    this.#follows = true;
    this.#scroller.scrollTo({ top: this.#scroller.scrollHeight, behavior });
    this.#lastTop = this.#scroller.scrollTop;
    this.#showWay();
  }

  #node(message) {
    if (message.role === "user") return userMessage(message, this);
    const view = new AnswerView(message, this);
    this.#views.set(message, view);
    return view.node;
  }

  #atEnd(limit = LIMIT_NEAR) {
    const { scrollTop, clientHeight, scrollHeight } = this.#scroller;
    return scrollTop + clientHeight >= scrollHeight - limit;
  }

  #onScroll() {
    this.#readScroll();
    this.#showWay();
  }

  /** Decide by the position whether the end is followed. */
  #readScroll() {
    const top = this.#scroller.scrollTop;
    // Only the user leaves the end upwards, be it by a few pixels. A position above the end on the
    // way down may be one of a smooth scroll, which an answer that grows must not interrupt. After
    // a click that changed no heights, the end is still where it was.
    if (top < this.#lastTop) this.#follows = this.#atEnd(EXACT);
    else this.#follows ||= this.#atEnd(top > this.#lastTop ? LIMIT_NEAR : EXACT);
    this.#lastTop = top;
  }

  #showWay() {
    this.#toEnd.hidden = this.#atEnd();
  }
}
