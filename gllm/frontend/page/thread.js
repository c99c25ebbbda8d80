// The messages of a conversation on the page.
//
// Owns how a message looks, finished or growing. Knows nothing of requests and of what is kept.

import { copyButton, el, icon, iconButton } from "./dom.js";
import { Markdown } from "./markdown.js";
import { count, duration, speed } from "./timing.js";

const LIMIT_NEAR = 40; // pixels from the end that still count as the end

/** What is wrong with an answer: {title, text, said, actions}, or null. `context` is in tokens. */
function problem(message, context, settings) {
  const { error, end, stats } = message;
  const room = context ? ` of ${count(context)} tokens` : "";
  if (error?.code === "context_length_exceeded") {
    const text =
      `The model’s context${room} holds all messages and the answer. ` +
      "Start a new chat, or shorten your last message.";
    const title = "This conversation no longer fits";
    return { title, text, said: error.message, actions: ["new", "edit"] };
  }
  if (error) {
    const actions = settings.has(error.param) ? ["settings", "again"] : ["again"];
    const title = message.content ? "The answer broke off" : "No answer";
    return { title, text: error.message, said: "", actions };
  }
  if (end === "length") {
    const full = context && stats?.prompt + stats?.tokens >= context;
    const title = full ? "The context is full" : "Cut off";
    const text = full
      ? `The answer ends here: the model’s context${room} is used up. Start a new chat to go on.`
      : `The answer reached the limit of ${count(stats?.tokens ?? 0)} tokens.`;
    return { title, text, said: "", actions: full ? ["new"] : ["settings"] };
  }
  return null;
}

const ACTIONS = {
  new: "New chat",
  edit: "Edit the message",
  again: "Try again",
  settings: "Settings",
};

/** An answer: its reasoning, its text, what became of it. */
class AnswerView {
  constructor(message, thread) {
    this.#message = message;
    this.#thread = thread;
    this.#thinking = el("pre");
    this.#thought = el("span");
    this.#reasoning = el(
      "details",
      { class: "reasoning", hidden: true },
      el("summary", {}, icon("chevron"), this.#thought),
      this.#thinking,
    );
    this.#body = el("div", { class: "prose" });
    this.#markdown = new Markdown(this.#body);
    this.#notice = el("div", { class: "notice", hidden: true });
    this.#stats = el("p", { class: "stats" });
    const again = () => thread.actions.again();
    const actions = [
      copyButton("Copy the answer", () => message.content),
      iconButton("again", "Answer again", again, { class: "plain small again" }),
    ];
    this.node = el(
      "li",
      { class: "message assistant" },
      el("h2", { class: "unseen" }, "Answer"),
      this.#reasoning,
      this.#body,
      this.#notice,
      el("div", { class: "meta" }, this.#stats, el("div", { class: "actions" }, ...actions)),
    );
    this.update();
  }

  #message;
  #thread;
  #reasoning;
  #thinking;
  #thought;
  #body;
  #markdown;
  #notice;
  #stats;

  /** Show what the message is now. */
  update() {
    const { content, reasoning, end } = this.#message;
    this.node.classList.toggle("growing", end === null);
    this.node.classList.toggle("waiting", end === null && !content && !reasoning);
    this.#markdown.show(content);
    this.#showReasoning(reasoning, end === null && !content);
    this.#showStats();
    this.#showProblem();
  }

  #showReasoning(reasoning, thinks) {
    this.#reasoning.hidden = !reasoning;
    if (!reasoning) return;
    this.#thinking.textContent = reasoning.trimStart();
    const seconds = this.#message.thinkingSeconds;
    const past = seconds == null ? "Thought" : `Thought for ${duration(seconds)}`;
    this.#thought.textContent = thinks ? "Thinking" : past;
    this.#reasoning.classList.toggle("thinks", thinks);
  }

  #showStats() {
    const { stats, end } = this.#message;
    const parts = [];
    const add = (name, title, text) => parts.push(el("span", { class: name, title }, text));
    if (stats?.ttft != null) {
      add("ttft", "Time to first token, seen from this browser", `TTFT ${duration(stats.ttft)}`);
    }
    if (stats?.rate != null) add("rate", "Speed after the first token", speed(stats.rate));
    if (stats?.tokens) add("tokens", "Tokens of this answer", `${count(stats.tokens)} tokens`);
    if (stats?.prompt != null) {
      const cached = stats.cached ? `, ${count(stats.cached)} cached` : "";
      const title = "Tokens of the prompt, and those among them found in the prefix cache";
      add("prompt", title, `prompt ${count(stats.prompt)}${cached}`);
    }
    if (end === "stopped") add("ended", "You stopped this answer", "stopped");
    this.#stats.replaceChildren(...parts);
  }

  #showProblem() {
    const { settings, actions, context } = this.#thread;
    const found = this.#message.end === null ? null : problem(this.#message, context(), settings);
    this.#notice.hidden = found === null;
    if (found === null) return;
    const button = (name) => {
      const onclick = () => actions[name](this.#message);
      return el("button", { type: "button", class: "quiet", onclick }, ACTIONS[name]);
    };
    this.#notice.classList.toggle("error", Boolean(this.#message.error));
    this.#notice.replaceChildren(
      el("strong", {}, found.title),
      el("p", {}, found.text),
      found.said ? el("p", { class: "said" }, found.said) : "",
      el("div", { class: "choices" }, ...found.actions.map(button)),
    );
  }
}

/** A user's message, as it was written. */
function userMessage(message, actions) {
  return el(
    "li",
    { class: "message user" },
    el("h2", { class: "unseen" }, "You"),
    el("div", { class: "bubble" }, message.content),
    el(
      "div",
      { class: "actions" },
      copyButton("Copy the message", () => message.content),
      iconButton("edit", "Edit the message", () => actions.edit(), { class: "plain small edit" }),
    ),
  );
}

/** The list of messages, and the scrolling around it. */
export class Thread {
  #views = new Map();
  #list;
  #scroller;
  #toEnd;

  /**
   * `parts`: the elements {list, scroller, toEnd}. `actions`: again, edit, new and settings, by
   * name. `context()`: the model's context in tokens, or null.
   */
  constructor({ list, scroller, toEnd }, settings, actions, context) {
    this.#list = list;
    this.#scroller = scroller;
    this.#toEnd = toEnd;
    this.settings = settings;
    this.actions = actions;
    this.context = context;
    scroller.addEventListener("scroll", () => this.#showWay());
    new ResizeObserver(() => this.#showWay()).observe(scroller);
    toEnd.addEventListener("click", () => this.toEnd("smooth"));
  }

  /** Show all messages, at their end. */
  show(messages) {
    this.#views.clear();
    this.#list.replaceChildren(...messages.map((message) => this.#node(message)));
    this.toEnd();
  }

  /** Show a message that has changed; who reads the end goes on reading it. */
  update(message) {
    const follows = this.#atEnd();
    this.#views.get(message)?.update();
    if (follows) this.toEnd();
    else this.#showWay();
  }

  /** Go to the end. */
  toEnd(behavior = "instant") {
    this.#scroller.scrollTo({ top: this.#scroller.scrollHeight, behavior });
    this.#showWay();
  }

  #node(message) {
    if (message.role === "user") return userMessage(message, this.actions);
    const view = new AnswerView(message, this);
    this.#views.set(message, view);
    return view.node;
  }

  #atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.#scroller;
    return scrollTop + clientHeight >= scrollHeight - LIMIT_NEAR;
  }

  #showWay() {
    this.#toEnd.hidden = this.#atEnd();
  }
}
