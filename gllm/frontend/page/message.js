// A question or an answer on the page, finished or growing.
//
// Owns how a message looks, and the buttons at it. thread.js places and scrolls messages.

import { canContinue } from "./answer.js";
import { versions } from "./branches.js";
import { copyButton, el, icon, iconButton } from "./dom.js";
import { sizeOf } from "./files.js";
import { Fold } from "./fold.js";
import { Markdown } from "./markdown.js";
import { count, duration, speed } from "./timing.js";

/** What is wrong with an answer: {title, text, said, actions}, or null. `context` is in tokens. */
function problem(message, context, settings) {
  const { error, end, stats } = message;
  const more = canContinue(message) ? ["continue"] : [];
  const room = context ? ` of ${count(context)} tokens` : "";
  if (error?.code === "context_length_exceeded") {
    const text =
      `The model’s context${room} holds all messages and the answer. ` +
      "Start a new chat, or shorten your last message.";
    const title = "This conversation no longer fits";
    return { title, text, said: error.message, actions: ["new", "edit"] };
  }
  if (error) {
    const actions = [...(settings.has(error.param) ? ["settings"] : []), "again", ...more];
    const title = message.content ? "The answer broke off" : "No answer";
    return { title, text: error.message, said: "", actions };
  }
  if (end === "length") {
    const full = context && stats?.prompt + stats?.tokens >= context;
    const title = full ? "The context is full" : "Cut off";
    const text = full
      ? `The answer ends here: the model’s context${room} is used up. Start a new chat to go on.`
      : `The answer reached the limit of ${count(stats?.tokens ?? 0)} tokens.`;
    return { title, text, said: "", actions: full ? ["new"] : [...more, "settings"] };
  }
  return null;
}

const ACTIONS = {
  continue: "Continue",
  new: "New chat",
  edit: "Edit the message",
  again: "Try again",
  settings: "Settings",
};

/** An answer: its reasoning, its text, what became of it. */
export class AnswerView {
  constructor(message, thread) {
    this.#message = message;
    this.#thread = thread;
    this.#thinking = el("div", { class: "thoughts" });
    this.#thoughts = new Markdown(this.#thinking);
    this.#thought = el("span");
    this.#reasoning = el(
      "details",
      { class: "reasoning", "aria-label": "Reasoning", hidden: true, ontoggle: () => this.#showThoughts() },
      el("summary", {}, icon("chevron"), this.#thought),
      this.#thinking,
    );
    this.#body = el("div", { class: "prose" });
    this.#markdown = new Markdown(this.#body);
    this.#notice = el("div", { class: "notice", hidden: true });
    this.#stats = el("p", { class: "stats" });
    this.#fold = new Fold(this.#body, message, thread.folds, "answer");
    const again = () => thread.actions.again(message);
    const goOn = () => thread.actions.continue(message);
    this.#continue = iconButton("continue", "Continue the answer", goOn, {
      class: "plain small continue",
    });
    const actions = [
      copyButton("Copy the answer", () => message.content),
      this.#continue,
      iconButton("again", "Answer again", again, { class: "plain small again" }),
    ];
    this.node = el(
      "li",
      { class: "message assistant" },
      el("h2", { class: "unseen" }, "Answer"),
      this.#reasoning,
      this.#body,
      this.#fold.button,
      this.#notice,
      el(
        "div",
        { class: "meta" },
        this.#stats,
        versionSwitch(message, thread.actions),
        el("div", { class: "actions" }, ...actions),
      ),
    );
    this.update();
  }

  #message;
  #thread;
  #reasoning;
  #thinking;
  #thoughts;
  #thought;
  #body;
  #markdown;
  #fold;
  #continue;
  #notice;
  #stats;

  /** Show what the message is now. */
  update() {
    const { content, reasoning, end } = this.#message;
    this.node.classList.toggle("growing", end === null);
    this.node.classList.toggle("waiting", end === null && !content && !reasoning);
    this.#markdown.show(content, end !== null);
    // An answer does not fold while it is read as it grows.
    this.#fold.show(end === null ? "" : content);
    this.#continue.hidden = !canContinue(this.#message);
    this.#showReasoning(reasoning, end === null && !content);
    this.#showStats();
    this.#showProblem();
  }

  #showReasoning(reasoning, thinks) {
    this.#reasoning.hidden = !reasoning;
    if (!reasoning) return;
    this.#showThoughts();
    const seconds = this.#message.thinkingSeconds;
    const past = seconds == null ? "Thought" : `Thought for ${duration(seconds)}`;
    this.#thought.textContent = thinks ? "Thinking" : past;
    this.#reasoning.classList.toggle("thinks", thinks);
  }

  /** Show the text of the reasoning, while it is unfolded. */
  #showThoughts() {
    const { reasoning, content, end } = this.#message;
    if (!this.#reasoning.open) return;
    this.#thoughts.show(reasoning.trimStart(), end !== null || Boolean(content));
  }

  #showStats() {
    const { stats, end, model } = this.#message;
    const parts = [];
    const add = (name, title, text) => parts.push(el("span", { class: name, title }, text));
    if (model && this.#thread.hasChoice()) add("model", "The model of this answer", model);
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

/** A file of a message, unfolded by a click. */
function fileView({ name, size, text }) {
  const shown = el("pre", { tabindex: 0, dir: "auto" });
  const onToggle = ({ target }) => (shown.textContent = target.open ? text : "");
  const title = el("span", { dir: "auto" }, name);
  const summary = el("summary", {}, icon("attach"), title, el("small", {}, sizeOf(size)));
  const properties = { class: "file", "aria-label": name, ontoggle: onToggle };
  return el("li", {}, el("details", properties, summary, shown));
}

/** A user's message, as it was written. */
export function userMessage(message, thread) {
  const { content, files } = message;
  const bubble = el("div", { class: "bubble", dir: "auto", hidden: !content }, content);
  const list = files ? el("ul", { class: "files", "aria-label": "Files" }) : null;
  list?.append(...files.map(fileView));
  const fold = new Fold(bubble, message, thread.folds, "question");
  fold.show(content);
  const { actions } = thread;
  return el(
    "li",
    { class: "message user" },
    el("h2", { class: "unseen" }, "You"),
    el("div", { class: "asked" }, list, bubble, fold.button),
    el(
      "div",
      { class: "side" },
      el(
        "div",
        { class: "actions" },
        copyButton("Copy the message", () => message.content),
        iconButton("edit", "Edit the message", () => actions.edit(message), {
          class: "plain small edit",
        }),
      ),
      versionSwitch(message, actions),
    ),
  );
}

/** Arrows between the versions of a message; null where there is one. */
function versionSwitch(message, actions) {
  const { index, count: number } = versions(message);
  if (number < 2) return null;
  const arrow = (name, label, to) =>
    iconButton(name, label, () => actions.turn(message, to, name), {
      class: `plain small ${name}`,
      disabled: to < 0 || to >= number,
    });
  return el(
    "div",
    { class: "versions", role: "group", "aria-label": "Versions of this message" },
    arrow("previous", "Previous version", index - 1),
    el("span", {}, `${index + 1} / ${number}`),
    arrow("next", "Next version", index + 1),
  );
}
