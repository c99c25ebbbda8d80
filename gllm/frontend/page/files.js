// Text files of a message: reading, limits, and the text that the model gets of them.
//
// Owns what may be attached. A file of a message: {name, size, text}; the size is in bytes.

export const MAX_FILES = 10; // of a message
const MAX_BYTES = 512 << 10; // of a message's files together; browsers keep about 5 MB for a site
const NUL = "\0";

/** Why a file cannot be attached. */
export class FileError extends Error {}

/** A text file, to be attached to a message that has others. Throws FileError. */
export async function readFile(file, others) {
  const used = others.reduce((sum, { size }) => sum + size, 0);
  if (others.length >= MAX_FILES) {
    throw new FileError(`“${file.name}” is not attached: a message has up to ${MAX_FILES} files.`);
  }
  if (used + file.size > MAX_BYTES) {
    const limit = `a message’s files have up to ${sizeOf(MAX_BYTES)} together`;
    throw new FileError(`“${file.name}” (${sizeOf(file.size)}) is not attached: ${limit}.`);
  }
  let bytes;
  try {
    bytes = new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new FileError(`“${file.name}” cannot be read. Is it a folder?`);
  }
  const text = decoded(bytes);
  if (text === null) {
    throw new FileError(`“${file.name}” is not attached: it is not a text file.`);
  }
  return { name: file.name, size: file.size, text };
}

/** The text of a file, in UTF-8 or, with its mark, in UTF-16; null for anything else. */
function decoded(bytes) {
  const [first, second] = bytes;
  const wide = { 0xfffe: "utf-16le", 0xfeff: "utf-16be" }[(first << 8) | second];
  try {
    const text = new TextDecoder(wide ?? "utf-8", { fatal: true }).decode(bytes);
    return text.includes(NUL) ? null : text;
  } catch {
    return null;
  }
}

/** What the model gets of a message: its files in fences, then what was written. */
export function textWithFiles({ content, files = [] }) {
  const fenced = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${JSON.stringify(name)}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...fenced, content].filter(Boolean).join("\n\n");
}

/** A size as people read it: 812 B, 3.4 KiB. */
export function sizeOf(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const [number, unit] = bytes < 1 << 20 ? [bytes / 1024, "KiB"] : [bytes / (1 << 20), "MiB"];
  return `${number < 9.95 ? Number(number.toFixed(1)) : Math.round(number)} ${unit}`;
}
