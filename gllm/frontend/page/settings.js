// What requests carry besides the messages.
//
// Owns the table of settings and its form. Knows nothing of conversations.

import { $, el } from "./dom.js";
import { keep, recall } from "./store.js";

const FIELDS = [
  {
    name: "temperature", label: "Temperature",
    help: "Higher is more varied; 0 is always the likeliest",
    min: 0, max: 2, step: 0.05,
  },
  {
    name: "top_p", label: "Top p",
    help: "Draw from the likeliest that add up to this share",
    min: 0.01, max: 1, step: 0.01,
  },
  {
    name: "top_k", label: "Top k",
    help: "Draw from so many of the likeliest",
    min: 1, step: 1, off: -1,
  },
  {
    name: "min_p", label: "Min p",
    help: "Drop what is below this share of the likeliest",
    min: 0, max: 1, step: 0.01,
  },
  {
    name: "max_tokens", label: "Max tokens",
    help: "Of one answer",
    min: 1, step: 1,
  },
  {
    name: "seed", label: "Seed",
    help: "The same draws again",
    step: 1,
  },
  {
    name: "repetition_penalty", label: "Repetition penalty",
    help: "Above 1 repeats less",
    min: 0.01, max: 2, step: 0.01,
  },
  {
    name: "presence_penalty", label: "Presence penalty",
    help: "Above 0 prefers new words",
    min: -2, max: 2, step: 0.1,
  },
  {
    name: "frequency_penalty", label: "Frequency penalty",
    help: "Above 0 avoids frequent words",
    min: -2, max: 2, step: 0.1,
  },
];

export class Settings {
  #values = recall("settings", {});
  #onChange;

  /** Fills the form. `onChange` is told how many settings are set. */
  constructor(onChange) {
    this.#onChange = onChange;
    $("fields").append(this.#system(), ...FIELDS.map((field) => this.#number(field)));
    $("reset-settings").addEventListener("click", () => this.#reset());
    onChange(this.count);
  }

  get count() {
    return Object.keys(this.#values).length;
  }

  /** The instruction that goes before every conversation; "" for none. */
  get system() {
    return this.#values.system ?? "";
  }

  /** The request's fields that are set. */
  get sampling() {
    const { system, ...fields } = this.#values;
    return fields;
  }

  /** Whether a request's field is one of these. */
  has(name) {
    return FIELDS.some((field) => field.name === name);
  }

  /** Show the form, at a field if one is named. */
  open(name = "system") {
    $("settings").showModal();
    $(`setting-${name}`).focus();
  }

  #system() {
    const area = el("textarea", {
      id: "setting-system",
      dir: "auto",
      rows: 3,
      placeholder: "None",
      oninput: () => this.#set("system", area.value.trim() || null),
    });
    area.value = this.system;
    return el("label", { class: "field whole" }, el("span", {}, "System prompt"), area);
  }

  #number({ name, label, help, off, ...limits }) {
    const id = `setting-${name}`;
    const problem = el("small", { id: `${id}-help` }, help);
    const input = el("input", {
      id,
      type: "number",
      inputmode: limits.step < 1 || limits.min < 0 ? "decimal" : "numeric",
      placeholder: "default",
      "aria-describedby": `${id}-help`,
      ...limits,
      // Any number within the limits will do; the step is for the arrows.
      oninput: () => {
        const bad = isBad(input.validity, limits);
        input.setAttribute("aria-invalid", bad);
        problem.textContent = bad ? range(limits) : help;
        this.#set(name, bad || input.value === "" ? null : input.valueAsNumber);
      },
    });
    const isOff = off !== undefined && this.#values[name] === off;
    input.value = isOff ? "" : this.#values[name] ?? "";
    const title = el("label", { for: id }, label);
    const toggle = off === undefined ? null : this.#off(name, label, off, input, isOff);
    return el("div", { class: "field" }, el("div", { class: "name" }, title, toggle), input, problem);
  }

  /** A box that sends the value which switches a setting off, and bars its field meanwhile. */
  #off(name, label, value, input, isOff) {
    const show = () => {
      input.disabled = box.checked;
      input.placeholder = box.checked ? "off" : "default";
    };
    const box = el("input", {
      id: `${input.id}-off`,
      type: "checkbox",
      "aria-label": `${label} off`,
      oninput: () => {
        show();
        input.value = "";
        input.dispatchEvent(new Event("input"));
        if (box.checked) this.#set(name, value);
      },
    });
    box.checked = isOff;
    show();
    return el("label", { class: "off" }, box, "off");
  }

  #set(name, value) {
    if (value === null) delete this.#values[name];
    else this.#values[name] = value;
    keep("settings", this.#values);
    this.#onChange(this.count);
  }

  #reset() {
    for (const input of $("fields").querySelectorAll("input, textarea")) {
      if (input.type === "checkbox") input.checked = false;
      else input.value = "";
      input.dispatchEvent(new Event("input"));
    }
  }
}

/** Whether what is written is not a number within the limits. */
function isBad({ rangeUnderflow, rangeOverflow, badInput, stepMismatch }, { step }) {
  return rangeUnderflow || rangeOverflow || badInput || (step === 1 && stepMismatch);
}

/** What a number has to be. */
function range({ min, max, step }) {
  const kind = step === 1 ? "a whole number" : "a number";
  if (min === undefined) return `Has to be ${kind}`;
  return `Has to be ${kind}${max === undefined ? ` from ${min}` : `, ${min} to ${max}`}`;
}
