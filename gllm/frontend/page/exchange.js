// Conversations as files: export and import.
//
// Owns the file format. An imported file is untrusted: every field is checked, none is copied unseen.

import { MAX_FILES } from "./files.js";
import { emptyConversation, titleOf } from "./store.js";

const MAX_BYTES = 4 << 20; // browsers keep about 5 MB for a site
const MAX_DEPTH = 100; // forks within forks
const MAX_TITLE = 120;
const ENDS = ["stop", "length", "stopped", "error"];
const COUNTS = ["ttft", "rate", "tokens", "prompt", "cached"];

/** What is wrong with a file. */
export class ImportError extends Error {}

/** A conversation as a file's text. */
export function exported(kept) {
  const updated = new Date(kept.updated).toISOString();
  const messages = kept.messages.map(outward);
  return JSON.stringify({ title: kept.title, updated, messages }, null, 2);
}

function outward({ role, content, files, reasoning, model, stats, end, branches }) {
  const tails = branches?.tails.map((tail) => tail && tail.map(outward));
  return {
    role,
    content,
    ...(files && { files: files.map(({ name, text }) => ({ name, text })) }),
    ...(reasoning && { reasoning }),
    ...(model && { model }),
    ...(stats && { stats }),
    ...(end && end !== "stop" && { end }),
    ...(branches && { branches: { index: branches.index, tails } }),
  };
}

/** The conversation in a file, under an id of its own. Throws ImportError. */
export async function imported(file) {
  if (file.size > MAX_BYTES) throw new ImportError(`it is larger than ${MAX_BYTES >> 20} MiB.`);
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw new ImportError("it is not JSON.");
  }
  const messages = inwardAll(found?.messages, "messages", 0);
  const { title } = found;
  const fallback = titleOf(messages[0].content || (messages[0].files?.[0].name ?? "")) || "Imported";
  const named = typeof title === "string" && title.trim() ? title.trim() : fallback;
  const when = Date.parse(found.updated);
  return {
    ...emptyConversation(),
    title: named.slice(0, MAX_TITLE),
    updated: Number.isNaN(when) ? Date.now() : Math.min(when, Date.now()),
    messages,
  };
}

function inwardAll(list, path, depth) {
  check(Array.isArray(list) && list.length > 0, path, "a list of messages");
  check(depth <= MAX_DEPTH, path, `at most ${MAX_DEPTH} forks deep`);
  return list.map((message, i) => inward(message, `${path}[${i}]`, depth));
}

function inward(message, path, depth) {
  check(message !== null && typeof message === "object", path, "an object");
  const { role, content, branches } = message;
  check(role === "user" || role === "assistant", `${path}.role`, "“user” or “assistant”");
  check(typeof content === "string", `${path}.content`, "a text");
  const own = role === "user" ? question(message, path) : answer(message, path);
  if (branches === undefined) return own;
  return { ...own, branches: inwardBranches(branches, `${path}.branches`, depth + 1) };
}

function question({ role, content, files }, path) {
  if (files === undefined) return { role, content };
  const isList = Array.isArray(files) && files.length > 0 && files.length <= MAX_FILES;
  check(isList, `${path}.files`, `a list of 1 to ${MAX_FILES} files`);
  const checked = files.map((file, i) => {
    check(typeof file?.name === "string", `${path}.files[${i}].name`, "a text");
    check(typeof file.text === "string", `${path}.files[${i}].text`, "a text");
    return { name: file.name, size: new Blob([file.text]).size, text: file.text };
  });
  return { role, content, files: checked };
}

function answer({ content, reasoning = "", model = null, stats = null, end = "stop" }, path) {
  check(typeof reasoning === "string", `${path}.reasoning`, "a text");
  check(model === null || typeof model === "string", `${path}.model`, "a text");
  check(typeof stats === "object", `${path}.stats`, "an object");
  check(ENDS.includes(end), `${path}.end`, `one of ${ENDS.join(", ")}`);
  const counts = COUNTS.map((name) => [name, stats?.[name] ?? null]);
  for (const [name, value] of counts) {
    check(value === null || Number.isFinite(value), `${path}.stats.${name}`, "a number");
  }
  return {
    role: "assistant",
    content,
    reasoning,
    thinkingSeconds: null,
    stats: stats && Object.fromEntries(counts),
    model,
    end,
    error: null,
  };
}

function inwardBranches(branches, path, depth) {
  const { index, tails } = branches ?? {};
  check(Array.isArray(tails) && tails.length > 0, `${path}.tails`, "a list");
  check(Number.isInteger(index) && index in tails, `${path}.index`, "a position in tails");
  const checked = tails.map((tail, i) => {
    const at = `${path}.tails[${i}]`;
    check((tail === null) === (i === index), at, i === index ? "null" : "a list of messages");
    if (tail === null) return null;
    const messages = inwardAll(tail, at, depth);
    check(!messages[0].branches, `${at}[0].branches`, "left out");
    return messages;
  });
  return { index, tails: checked };
}

function check(isRight, path, wanted) {
  if (!isRight) throw new ImportError(`${path} has to be ${wanted}.`);
}
