// Task lists in Markdown: list items that begin with "[ ]" or "[x]".
//
// Owns their syntax. tokens.js makes the nodes.

const MARK = /^\[([ xX])\](?:\s|$)/;

/** Teach a markdown-it parser task lists: tokens "task", and items with `meta.isTask`. */
export function addTasks(parser) {
  // Behind the rule that joins neighbouring texts.
  parser.core.ruler.push("tasks", ({ tokens, Token }) => {
    tokens.forEach((item, i) => {
      const [paragraph, inline] = tokens.slice(i + 1, i + 3);
      if (item.type !== "list_item_open" || paragraph?.type !== "paragraph_open") return;
      const [text] = inline.children;
      const found = text?.type === "text" && MARK.exec(text.content);
      if (!found) return;
      const box = new Token("task", "input", 0);
      box.meta = { isDone: found[1] !== " " };
      text.content = text.content.slice(found[0].length);
      inline.children.unshift(box);
      item.meta = { isTask: true };
    });
  });
}
