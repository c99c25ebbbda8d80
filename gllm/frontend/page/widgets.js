// Small parts of the page: the server's state, the appearance, the key's dialog, short notices.
//
// Owns these parts. Knows nothing of conversations.

import { $ } from "./dom.js";
import { keep, keepTheme } from "./store.js";

const WORDS = {
  ready: "ready",
  loading: "loading the model",
  recovering: "recovering",
  draining: "shutting down",
  down: "out of order",
  unreachable: "not reachable",
};
const LOOK_AGAIN = { ready: 20_000, loading: 1_000, recovering: 1_000 };
const LOOK_AGAIN_OTHERWISE = 4_000;
const BUSY_MS = 2_000;
const TOAST_MS = 7_000;

/**
 * Show the server's state while the page is seen. `onState(now, before)` is told it. While
 * `isBusy()`, the state is looked at more often, so that a pause of the answer is explained.
 */
export function watchState(server, isBusy, onState) {
  let timer = null;
  async function look() {
    clearTimeout(timer);
    const state = await server.state();
    clearTimeout(timer);
    const before = $("state").dataset.state;
    $("state").dataset.state = state;
    $("state-text").textContent = WORDS[state];
    onState(state, before);
    const pause = LOOK_AGAIN[state] ?? LOOK_AGAIN_OTHERWISE;
    if (!document.hidden) timer = setTimeout(look, isBusy() ? Math.min(pause, BUSY_MS) : pause);
  }
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) look();
  });
  look();
  return { look };
}

/** Light, dark, or as the system; see theme.js. */
export function watchTheme() {
  const chosen = document.documentElement.dataset.theme ?? "system";
  for (const radio of $("theme").querySelectorAll("input")) {
    radio.checked = radio.value === chosen;
    radio.addEventListener("change", () => {
      keepTheme(radio.value);
      if (radio.value === "system") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = radio.value;
    });
  }
}

/** Ask the user for the server's key: the key, which is kept, or null. */
export function askKey(message) {
  const dialog = $("key-dialog");
  $("key-message").textContent = message;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    $("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => {
      const key = dialog.returnValue === "use" ? $("key").value.trim() : "";
      $("key").value = "";
      if (key) keep("key", key);
      resolve(key || null);
    };
  });
}

let toastTimer = null;

/** Say something for a while, with something to do about it. */
export function toast(text, label = "", action = () => {}) {
  clearTimeout(toastTimer);
  $("toast-text").textContent = text;
  $("toast-action").textContent = label;
  $("toast-action").hidden = !label;
  $("toast-action").onclick = () => {
    $("toast").hidden = true;
    action();
  };
  $("toast").hidden = false;
  toastTimer = setTimeout(() => ($("toast").hidden = true), TOAST_MS);
}
