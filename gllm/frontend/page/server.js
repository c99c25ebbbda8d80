// The server this page came from.
//
// Owns requests, their errors and the key. Knows nothing of conversations and of the page: who asks
// for a key is given.

import { eventsOf } from "./sse.js";

/** What the server, or the way to it, said against a request. */
export class ServerError extends Error {
  /** @param {{status?: number, code?: string, param?: string}} more */
  constructor(message, more = {}) {
    super(message);
    Object.assign(this, { status: 0, code: null, param: null }, more);
  }
}

const STATES = {
  engine_loading: "loading",
  engine_recovering: "recovering",
  engine_draining: "draining",
  engine_dead: "down",
};

export class Server {
  #key;
  #askKey;
  #asking = null;

  /** `askKey(message)` resolves to a key, or to null where the user gives none. */
  constructor(key, askKey) {
    this.#key = key;
    this.#askKey = askKey;
  }

  /**
   * The served models: each {name, length, vocabulary, controls}, where `controls` are the variables
   * of the chat template that control reasoning. Throws ServerError.
   */
  async models() {
    const { data } = await (await this.#fetch("v1/models", {})).json();
    if (!data?.length) throw new ServerError("The server serves no model.");
    return data.map((card) => ({
      name: card.id,
      length: card.max_model_len ?? null,
      vocabulary: card.vocab_size ?? null,
      controls: card.reasoning_controls ?? [],
    }));
  }

  /** ready, loading, recovering, draining, down or unreachable. */
  async state() {
    try {
      const response = await this.#send("ready", { cache: "no-store" });
      if (response.ok) return "ready";
      const { code } = await failure(response);
      return STATES[code] ?? (response.status === 401 ? "ready" : "down");
    } catch {
      return "unreachable";
    }
  }

  /**
   * The chunks of an answer. `onSend` is called when the request goes out. Throws ServerError, and
   * AbortError once the signal is aborted.
   */
  async *chat(body, signal, onSend) {
    const streamed = {
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(streamed), signal };
    const response = await this.#fetch("v1/chat/completions", options, onSend);
    try {
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.message, chunk.error);
        yield chunk;
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      throw new ServerError(`The connection broke off: ${error.message}.`);
    }
    throw new ServerError("The connection ended before the answer did.");
  }

  /** A response that is good; a server that wants a key gets one. Throws ServerError. */
  async #fetch(path, options, onSend = () => {}) {
    for (;;) {
      const key = this.#key;
      onSend();
      const response = await this.#send(path, options);
      if (response.ok) return response;
      const error = await failure(response);
      if (response.status !== 401) throw error;
      // Another request may have got a key meanwhile.
      if (key !== this.#key) continue;
      this.#asking ??= this.#askKey(error.message).finally(() => (this.#asking = null));
      const given = await this.#asking;
      if (given === null) throw error;
      this.#key = given;
    }
  }

  async #send(path, options) {
    const authorization = this.#key ? { Authorization: `Bearer ${this.#key}` } : {};
    const headers = { ...options.headers, ...authorization };
    try {
      return await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached. Is it running?");
    }
  }
}

/** What a refusal says. */
async function failure(response) {
  const { status } = response;
  try {
    const { error } = await response.json();
    return new ServerError(error.message, { status, code: error.code, param: error.param });
  } catch {
    // A proxy on the way answers in its own words.
    return new ServerError(`The server answered ${status} ${response.statusText}.`, { status });
  }
}
