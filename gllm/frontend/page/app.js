// The chat page: from what the user does to conversations and answers.
//
// Owns the current conversation, running answers, and what the page's controls do. Knows nothing of
// how requests are sent, messages are shown and things are kept.

import { emptyAnswer, fill } from "./answer.js";
import { Attachments } from "./attachments.js";
import { fork, replace, switchTo } from "./branches.js";
import { $, el } from "./dom.js";
import { showExamples } from "./examples.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { thinkingChoices, thinkingFields } from "./thinking.js";
import { Thread } from "./thread.js";
import { count } from "./timing.js";
import { askKey, toast, watchState, watchTheme } from "./widgets.js";

const HIGH = 0.85; // share of the context from which on the gauge warns
const input = $("input");
const server = new Server(store.recall("key", null), askKey);
const settings = new Settings((number) => {
  $("settings-count").hidden = !number;
  $("settings-count").textContent = number || "";
});
const runs = new Map(); // of growing answers, by conversation: {asked, controller}
const attachments = new Attachments(showSend, (text) => toast(text));
let models = [];
let model = { name: null, length: null, vocabulary: null, controls: [] };
let current = store.emptyConversation();
let edited = null; // the message that the field is to replace

const thread = new Thread(
  { list: $("thread"), scroller: $("scroller"), toEnd: $("to-end") },
  settings,
  {
    again: (message) => answerAgain(message),
    continue: (message) => continueAnswer(message),
    edit: (message) => edit(message),
    turn: (message, index, arrow) => turn(message, index, arrow),
    new: () => open(null),
    settings: ({ error }) => settings.open(error?.param ?? "max_tokens"),
  },
  () => model.length,
  () => models.length > 1,
);
const sidebar = new Sidebar({
  open: (id, at) => {
    open(id);
    if (at >= 0) thread.reveal(at);
  },
  add: (imported) => keep(imported, imported.updated),
  busy: (id) => runs.has(id),
  failed: noRoom,
  renamed: (id, title) => {
    for (const held of [current, runs.get(id)?.asked]) if (held?.id === id) held.title = title;
  },
  deleted: (kept) => {
    runs.get(kept.id)?.controller.abort();
    if (kept.id === current.id) open(null);
    toast("Conversation deleted.", "Undo", () => {
      keep(kept);
      open(kept.id);
    });
  },
});

/** Show a conversation; null for a new one. */
function open(id) {
  const kept = runs.get(id)?.asked ?? (id && store.conversation(id));
  current = kept ?? store.emptyConversation();
  // An answer that nobody fills any more was left with the page that did.
  const left = runs.has(id) ? [] : current.messages.filter(({ end }) => end === null);
  for (const message of left) message.end = "stopped";
  store.keep("current", current.id);
  cancelEdit();
  if (sidebar.isOpen) sidebar.toggle(false);
  showConversation();
  focusInput();
}

/** Show the messages at their end, and all around them. */
function showConversation() {
  // First: the thread of an empty page is not displayed, and what is not displayed cannot scroll.
  showAll();
  thread.show(current.messages);
}

function showAll() {
  const grows = runs.has(current.id);
  const empty = current.messages.length === 0;
  document.title = empty ? model.name ?? "gllm" : `${current.title} · gllm`;
  document.body.classList.toggle("empty", empty);
  document.body.classList.toggle("running", grows);
  $("stop").hidden = !grows;
  $("send").hidden = grows;
  showSend();
  showContext();
  sidebar.show(current.id);
}

/** How much of the model's context the conversation uses. */
function showContext() {
  const stats = current.messages.at(-1)?.stats;
  const used = (stats?.prompt ?? 0) + (stats?.tokens ?? 0);
  $("context").hidden = !used || !model.length;
  if (!used || !model.length) return;
  $("gauge").firstChild.style.width = `${Math.min(100, (100 * used) / model.length)}%`;
  $("gauge").classList.toggle("high", used > HIGH * model.length);
  $("context-text").textContent = `${count(used)} of ${count(model.length)} tokens`;
}

/** Send what is written, as a new message or as another version of the edited one. */
function send() {
  const text = input.value.trim();
  if (!canSend() || runs.has(current.id)) return;
  const files = attachments.take();
  const at = current.messages.indexOf(edited);
  cancelEdit();
  input.value = "";
  fitInput();
  ask(text, at, files);
}

/** Ask a question, behind all messages or as another version of the one at a position. */
function ask(text, at = -1, files = []) {
  const { messages } = current;
  const message = { role: "user", content: text, ...(files.length && { files }) };
  if (!messages.length) current.title = store.titleOf(text || files[0].name);
  if (at >= 0) fork(messages, at, message);
  else messages.push(message);
  const next = emptyAnswer(model.name);
  messages.push(next);
  answer(next);
}

/** Fill the last message, an answer that is empty or cut off, with the answer to those before it. */
async function answer(message) {
  const asked = current;
  const before = asked.messages.slice(0, -1);
  const controller = new AbortController();
  runs.set(asked.id, { asked, controller });
  state.look();
  keep(asked);
  showConversation();
  $("announcer").textContent = "The answer is on its way.";
  const show = perFrame(() => {
    thread.update(message);
    if (asked === current) showContext();
  });
  const fields = thinkingFields(model.controls, $("thinking-choice").value);
  const sampling = { ...settings.sampling, ...fields };
  const { system } = settings;
  await fill(message, before, server, { system, sampling }, controller.signal, show);
  runs.delete(asked.id);
  if (store.conversation(asked.id)) keep(asked);
  thread.update(message);
  if (asked === current) $("announcer").textContent = message.error?.message ?? message.content;
  showAll();
  if (message.error) state.look();
}

/** Another version of an answer. */
function answerAgain(message) {
  const { messages } = current;
  const at = messages.indexOf(message);
  if (runs.has(current.id) || at < 0) return;
  const next = emptyAnswer(model.name);
  // A failure that said nothing is no version to come back to.
  const isLost = !message.content && !message.reasoning && at === messages.length - 1;
  if (isLost) replace(messages, at, next);
  else fork(messages, at, next);
  cancelEdit();
  answer(next);
}

/** Let the model go on where an answer, the last message, was cut off. */
function continueAnswer(message) {
  if (runs.has(current.id) || message !== current.messages.at(-1)) return;
  cancelEdit();
  const isServed = models.some(({ name }) => name === message.model);
  Object.assign(message, { end: null, error: null, model: isServed ? message.model : model.name });
  answer(message);
}

/** Show another version of a message, with what followed it. */
function turn(message, index, arrow) {
  const at = current.messages.indexOf(message);
  if (runs.has(current.id) || at < 0) return;
  cancelEdit();
  switchTo(current.messages, at, index);
  keep(current, current.updated);
  showAll();
  thread.showAround(current.messages, at, `.${arrow}`);
}

const stop = () => runs.get(current.id)?.controller.abort();

/** Take a question, or the one before an answer, into the field. */
function edit(message) {
  if (runs.has(current.id)) return;
  const until = current.messages.indexOf(message) + 1;
  edited = current.messages.slice(0, until).findLast(({ role }) => role === "user") ?? null;
  if (edited === null) return;
  $("editing").hidden = false;
  input.value = edited.content;
  attachments.set(edited.files ?? []);
  fitInput();
  input.focus();
}

function cancelEdit() {
  if (edited === null) return;
  edited = null;
  $("editing").hidden = true;
  input.value = "";
  attachments.set([]);
  fitInput();
}

/** Keep a conversation that has changed; false where there is no room for it. */
function keep(changed, updated = Date.now()) {
  changed.updated = updated;
  const isKept = store.save(changed);
  if (!isKept) noRoom();
  return isKept;
}

function noRoom() {
  toast("This browser has no room for more: export and delete conversations.");
}

/** A function that calls another at most once a frame. */
function perFrame(call) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      call();
    });
  };
}

/** The field is as high as its text, within what the stylesheet allows. */
function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  showSend();
}

/** Whether there is something to send. */
function canSend() {
  const isEmpty = !input.value.trim() && !attachments.isReady;
  return !isEmpty && !attachments.isReading;
}

function showSend() {
  $("send").disabled = !canSend();
}

const touches = () => matchMedia("(pointer: coarse)").matches;

/** On a touch screen the keyboard would cover what there is to read. */
function focusInput() {
  if (!touches()) input.focus();
}

async function learnModels() {
  try {
    models = await server.models();
  } catch (error) {
    toast(error.message, "Try again", learnModels);
    return;
  }
  $("models").replaceChildren(...models.map(({ name }) => el("option", {}, name)));
  $("models").hidden = models.length < 2;
  $("model").classList.toggle("unseen", models.length > 1);
  chooseModel(store.recall("model", null));
}

/** Ask a model from now on, the first one where none has the name. */
function chooseModel(chosen) {
  model = models.find(({ name }) => name === chosen) ?? models[0];
  $("models").value = model.name;
  $("model").textContent = model.name;
  $("model").title = model.name;
  $("welcome-model").textContent = model.name;
  const room = model.length ? `Its context holds ${count(model.length)} tokens. ` : "";
  $("welcome-text").textContent = `${room}Conversations stay in this browser.`;
  showExamples($("examples"), model, (text) => {
    if (!runs.has(current.id)) ask(text);
  });
  showThinking();
  showAll();
  thread.refresh();
}

/** The choice of thinking, where the model has one. */
function showThinking() {
  const choices = thinkingChoices(model.controls);
  const options = choices.map(([value, label]) => el("option", { value }, label));
  $("thinking-choice").replaceChildren(...options);
  $("thinking").hidden = !choices.length;
  const kept = store.recall("thinking", "");
  $("thinking-choice").value = choices.some(([value]) => value === kept) ? kept : "";
}

const isBusy = () => runs.size > 0;
const state = watchState(server, isBusy, (now, before) => {
  if (now === "ready" && before !== "ready") learnModels();
});

function onKey(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (runs.has(current.id)) stop();
  else if (edited !== null) cancelEdit();
  else if (sidebar.isOpen) sidebar.toggle(false);
}

function onInputKey(event) {
  // While an input method composes, Enter takes its suggestion; touch keyboards lack Shift Enter.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touches()) return;
  event.preventDefault();
  send();
}

input.addEventListener("input", fitInput);
input.addEventListener("keydown", onInputKey);
document.addEventListener("keydown", onKey);
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
$("models").addEventListener("change", ({ target }) => {
  store.keep("model", target.value);
  chooseModel(target.value);
});
$("thinking-choice").addEventListener("change", ({ target }) =>
  store.keep("thinking", target.value || null),
);
$("cancel-edit").addEventListener("click", cancelEdit);
$("open-settings").addEventListener("click", () => settings.open());
for (const id of ["new-chat", "new-chat-narrow"]) $(id).addEventListener("click", () => open(null));
// Another tab of this browser keeps in the same place.
addEventListener("storage", (event) => {
  if (!store.concerns(event)) return;
  if (event.key?.endsWith(current.id) && !runs.has(current.id)) open(current.id);
  else sidebar.show();
});
// What has come of growing answers is not lost with the page.
addEventListener("pagehide", () => runs.forEach(({ asked }) => store.save(asked)));

watchTheme();
open(store.recall("current", null));
