// One answer on its way: the request, its chunks, its end.
//
// Owns the request's body, and how chunks change a message. Knows nothing of how it is shown.

import { textWithFiles } from "./files.js";
import { Timing } from "./timing.js";

/** A message that has nothing yet. */
export const emptyAnswer = (model) => ({
  role: "assistant",
  content: "",
  reasoning: "",
  thinkingSeconds: null,
  stats: null,
  model,
  end: null,
  error: null,
});

/**
 * The messages of a request: what the model is to know of a conversation. A question that got no
 * answer is left out with it, for many chat templates want the roles in turns.
 */
function history(messages, system) {
  const opening = system ? [{ role: "system", content: system }] : [];
  const isUnanswered = (next) => next?.role === "assistant" && next.content === "";
  const texts = messages.map((message) => ({ role: message.role, content: textWithFiles(message) }));
  return [...opening, ...texts.filter(({ content }, i) => content && !isUnanswered(messages[i + 1]))];
}

const hasBegun = ({ content, reasoning }) => Boolean(content || reasoning);

/** Whether an answer ends where it was cut off, and has a text to go on from. */
export const canContinue = (message) =>
  hasBegun(message) && message.end !== null && message.end !== "stop";

/** The request's body for the answer, or for the rest of an answer that has a text already. */
function bodyOf(message, messages, { sampling, system }) {
  const { model, content, reasoning } = message;
  const body = { model: model ?? undefined, messages: history(messages, system), ...sampling };
  if (!hasBegun(message)) return body;
  // Without a content the model goes on thinking.
  const thought = reasoning && { reasoning_content: reasoning };
  body.messages.push({ role: "assistant", content: content || null, ...thought });
  return { ...body, add_generation_prompt: false, continue_final_message: true };
}

/**
 * Fill `message` with the answer to the `messages` before it, or continue the answer that it has.
 * `onChange` is called after every change; the signal stops it. Never throws: what goes wrong becomes
 * the message's error.
 */
export async function fill(message, messages, server, settings, signal, onChange) {
  const timing = new Timing(hasBegun(message) ? message.stats : null);
  const thoughtBefore = message.thinkingSeconds ?? 0;
  const body = bodyOf(message, messages, settings);
  let thinkingSince = null;
  let end = null;
  try {
    const start = () => timing.start(performance.now());
    for await (const chunk of server.chat(body, signal, start)) {
      const now = performance.now();
      const choice = chunk.choices?.[0];
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (reasoning) {
        thinkingSince ??= now;
        message.reasoning += reasoning;
      }
      if (content) message.content += content;
      if (thinkingSince !== null && !message.content) {
        message.thinkingSeconds = thoughtBefore + (now - thinkingSince) / 1000;
      }
      end = choice?.finish_reason ?? end;
      timing.chunk(now, Boolean(content || reasoning), chunk.usage);
      message.stats = timing.stats();
      onChange();
    }
    message.end = end === "length" ? "length" : "stop";
    if (end === "abort") message.error = { message: "The server ended this answer early." };
  } catch (error) {
    message.end = signal.aborted ? "stopped" : "error";
    if (!signal.aborted) {
      const { message: text, status, code, param } = error;
      message.error = { message: text, status, code, param };
    }
  }
  onChange();
}
