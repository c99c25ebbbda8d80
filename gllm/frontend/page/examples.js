// Example prompts of an empty conversation.
//
// Owns their texts. What sending one does is given.

import { el } from "./dom.js";

const EXAMPLES = [
  ["A story", "Tell me a story about Otto the fox."],
  ["Words", "What is the opposite of big?"],
  ["Mathematics", "Derive the formula that solves a quadratic equation, step by step."],
  ["Code", "Write a Python function that finds all primes up to n, with tests."],
];

/** Fill a list with buttons that send a prompt. */
export function showExamples(list, send) {
  const item = ([title, text]) =>
    el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: "example", onclick: () => send(text) },
        el("strong", {}, title),
        el("span", {}, text),
      ),
    );
  list.replaceChildren(...EXAMPLES.map(item));
}
