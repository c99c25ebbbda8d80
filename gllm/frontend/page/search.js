// Search over the kept conversations.
//
// Owns what matches, and the piece of text that shows it.

import { everyMessage } from "./branches.js";

const BEFORE = 24; // characters of a piece before the match
const AFTER = 60;

/** The words of a query. */
export const wordsOf = (query) => query.toLowerCase().split(/\s+/).filter(Boolean);

/**
 * Where all words are found in a conversation, in its title or its messages: {piece, at}, or null.
 * `at` is the position of the shown message with the first match, or -1.
 */
export function match(conversation, words) {
  if (!words.length) return { piece: "", at: -1 };
  const shown = conversation.messages;
  const texts = [...everyMessage(shown)].map(textOf);
  const lower = texts.map((text) => text.toLowerCase());
  const all = [conversation.title.toLowerCase(), ...lower];
  if (!words.every((word) => all.some((text) => text.includes(word)))) return null;
  // The message that has most of the words.
  const hits = lower.map((text) => words.filter((word) => text.includes(word)).length);
  const most = Math.max(0, ...hits);
  const best = most ? hits.indexOf(most) : -1;
  if (best < 0) return { piece: "", at: -1 };
  const word = words.find((one) => lower[best].includes(one));
  const piece = pieceOf(texts[best], lower[best].indexOf(word), word.length);
  return { piece, at: best < shown.length ? best : -1 };
}

/** What a message is found by: its text and the names of its files. */
const textOf = ({ content, files = [] }) =>
  [content, ...files.map(({ name }) => name)].filter(Boolean).join("\n");

function pieceOf(text, at, length) {
  const [from, to] = [Math.max(0, at - BEFORE), Math.min(text.length, at + length + AFTER)];
  const piece = text.slice(from, to).replace(/\s+/g, " ").trim();
  return `${from ? "…" : ""}${piece}${to < text.length ? "…" : ""}`;
}
