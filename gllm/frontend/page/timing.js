// When an answer's tokens came, and figures as people read them.
//
// Owns TTFT, tokens per second, and number formats. Knows nothing of the page.

const SHORTEST = 0.05; // seconds; below, what a busy browser was late for counts too much

/** The times of one answer, as this browser saw them. */
export class Timing {
  #sent = 0;
  #first = null;
  #last = null;
  #tokensAtFirst = 1;
  #usage = null;
  #begun;

  /** `begun`: the figures of an answer's beginning, of which this is the rest; or null. */
  constructor(begun = null) {
    this.#begun = begun;
  }

  /** The request goes out; times are milliseconds. */
  start(now) {
    this.#sent = now;
  }

  /** A chunk has come. `hasOutput` says whether it brought text. */
  chunk(now, hasOutput, usage) {
    if (usage) this.#usage = usage;
    if (!hasOutput) return;
    if (this.#first === null) {
      this.#first = now;
      this.#tokensAtFirst = Math.max(1, usage?.completion_tokens ?? 1);
    }
    this.#last = now;
  }

  /** What is known so far: {ttft in seconds, rate in tokens per second, and token counts}. */
  stats() {
    const usage = this.#usage ?? {};
    const begun = this.#begun ?? {};
    const tokens = usage.completion_tokens ?? null;
    const seconds = (this.#last - this.#first) / 1000;
    const later = (tokens ?? 0) - this.#tokensAtFirst;
    return {
      ttft: begun.ttft ?? (this.#first === null ? null : (this.#first - this.#sent) / 1000),
      rate: seconds >= SHORTEST && later > 0 ? later / seconds : null,
      tokens: begun.tokens == null ? tokens : begun.tokens + (tokens ?? 0),
      // The prompt of a rest holds the beginning.
      prompt: begun.prompt ?? usage.prompt_tokens ?? null,
      cached: begun.cached ?? usage.prompt_tokens_details?.cached_tokens ?? null,
    };
  }
}

/** A whole number with separators: 1,024. */
export const count = (number) => number.toLocaleString("en");

/** A duration: 41 ms, 1.2 s. */
export function duration(seconds) {
  return seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

/** A speed: 8.4 or 212 tokens/s. */
export function speed(rate) {
  return `${rate < 99.95 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`;
}
