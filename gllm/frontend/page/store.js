// What this browser keeps: conversations, settings, the key, the appearance.
//
// Owns the names and shapes of what is kept. Knows nothing of the page and the server.
//
// A conversation: {id, title, updated, messages}. A message: {role, content}, of a question with
// files also {files}, see files.js, and of an answer also {reasoning, thinkingSeconds, stats, model, end, error}; end is stop, length, stopped or error,
// and null while it grows. Either may have `branches`, see branches.js.

const CONVERSATION = "gllm.conversation.";
const TITLE_LENGTH = 60;

/** A conversation that nobody has written to. */
export function emptyConversation() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  const id = [...random].map((number) => number.toString(36)).join("");
  return { id, title: "", updated: 0, messages: [] };
}

/** A title out of a first message. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  if (line.length <= TITLE_LENGTH) return line;
  return `${line.slice(0, TITLE_LENGTH).replace(/\s\S*$/, "")}…`;
}

/** All conversations, the latest first. */
export function conversations() {
  const names = keys().filter((name) => name.startsWith(CONVERSATION));
  const found = names.map((name) => read(name)).filter((kept) => Array.isArray(kept?.messages));
  return found.sort((a, b) => b.updated - a.updated);
}

/** A conversation by its id, or null. */
export const conversation = (id) => read(CONVERSATION + id);

/** Keep a conversation. False where the browser has no room. */
export const save = (kept) => write(CONVERSATION + kept.id, kept);

/** Forget a conversation. */
export const remove = (id) => erase(CONVERSATION + id);

/** Whether an event of the browser's storage is about a conversation. */
export const concerns = (event) => event.key === null || event.key.startsWith(CONVERSATION);

/** A single thing kept by name: current, settings, key, model, thinking. */
export const recall = (name, otherwise) => read(`gllm.${name}`) ?? otherwise;

/** Keep a single thing; null forgets it. */
export const keep = (name, value) =>
  value === null ? erase(`gllm.${name}`) : write(`gllm.${name}`, value);

/** The appearance, as theme.js reads it. */
export function keepTheme(theme) {
  try {
    localStorage.setItem("gllm.theme", theme);
  } catch {
    // A browser that keeps nothing shows it until the page is left.
  }
}

function keys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return [];
  }
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function erase(name) {
  try {
    localStorage.removeItem(name);
    return true;
  } catch {
    return false;
  }
}
