// The chosen appearance, before the first paint. A module would come after it.
//
// Owns the one line that makes a choice seen. Knows nothing of the switch.

{
  let chosen = null;
  try {
    chosen = localStorage.getItem("gllm.theme");
  } catch {
    // A browser that keeps nothing follows the system.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
