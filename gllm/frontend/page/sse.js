// Server-sent events out of a stream of bytes.
//
// Owns the event format. Knows nothing of what the events say.

/** Splits text that arrives in pieces into the data of events. */
export class EventParser {
  #rest = "";
  #data = [];

  /** The data of the events that a piece of text completes. */
  push(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line.startsWith("data:")) this.#data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && this.#data.length) events.push(this.#data.splice(0).join("\n"));
    }
    return events;
  }
}

/** The data of a response's events, as they come. Leaving the loop closes the connection. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
