// Elements, made of nodes alone: no text ever becomes markup.
//
// Owns how nodes are made. Knows nothing of the page.

const SVG = "http://www.w3.org/2000/svg";

/** The element of the page with an id. */
export const $ = (id) => document.getElementById(id);

/** An element. Names that begin with "on" are listeners, null children are left out. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

/** A symbol of the page's sprite. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows an icon and says what it does. */
export function iconButton(name, label, onclick, properties = {}) {
  const more = { type: "button", class: "plain small", "aria-label": label, title: label };
  return el("button", { ...more, ...properties, onclick }, icon(name));
}

/** A button that copies a text and shows that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("done"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/** Put a text on the clipboard; browsers offer the new way over HTTPS and to localhost alone. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "unseen", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
