// Example prompts of an empty conversation.
//
// Owns their texts. What sending one does is given.

import { el } from "./dom.js";

const EXAMPLES = [
  ["Explain", "Explain how a vaccine works, in five sentences and without technical terms."],
  ["Compare", "Compare trains, buses and bicycles for a city of 200,000 people, in a table."],
  ["Mathematics", "Derive the formula that solves a quadratic equation, step by step."],
  ["Code", "Write a Python function that finds all primes up to n, with tests."],
];
// For models that know no more than the words of small stories, as the one that ships with gllm.
const EXAMPLES_OF_SMALL_MODELS = [
  ["A story", "Tell me a story about Otto the fox."],
  ["Another story", "Tell me a story about Lily the owl."],
  ["Words", "What is the opposite of big?"],
  ["A greeting", "Hello! Who are you?"],
];
const SMALL_VOCABULARY = 16_000; // tokens; general models have 32,000 and more

/** Fill a list with buttons that send a prompt which suits a model: {vocabulary, or null}. */
export function showExamples(list, { vocabulary }, send) {
  const isSmall = vocabulary !== null && vocabulary < SMALL_VOCABULARY;
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
  list.replaceChildren(...(isSmall ? EXAMPLES_OF_SMALL_MODELS : EXAMPLES).map(item));
}
