// How much a model thinks before it answers: what can be chosen, and the request's fields for it.
//
// Owns the choices. A model is known by `controls`, the variables of its chat template that control
// reasoning: enable_thinking, thinking, reasoning_effort.

const SWITCHES = ["enable_thinking", "thinking"];
const LABELS = { on: "on", off: "off", low: "low", medium: "medium", high: "high" };

/** What can be chosen for a model: [[value, label]]; empty where its template has no choice. */
export function thinkingChoices(controls) {
  const isSwitched = SWITCHES.some((name) => controls.includes(name));
  const hasEfforts = controls.includes("reasoning_effort");
  if (!isSwitched && !hasEfforts) return [];
  const levels = hasEfforts ? ["low", "medium", "high"] : ["on"];
  const values = isSwitched ? [...levels, "off"] : levels;
  return [["", "default"], ...values.map((value) => [value, LABELS[value]])];
}

/** The request's fields for a choice; none where the model does not have it. */
export function thinkingFields(controls, choice) {
  const isOffered = thinkingChoices(controls).some(([value]) => value === choice);
  if (!isOffered || !choice) return {};
  if (choice !== "on" && choice !== "off") return { reasoning_effort: choice };
  const names = SWITCHES.filter((name) => controls.includes(name));
  const values = names.map((name) => [name, choice === "on"]);
  return { chat_template_kwargs: Object.fromEntries(values) };
}
