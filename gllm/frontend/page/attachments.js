// The files that the next message will have, at the message field: choosing, dropping, removing.
//
// Owns their list and its controls. files.js reads them.

import { $, el, iconButton } from "./dom.js";
import { FileError, readFile, sizeOf } from "./files.js";

/** The files of the message that is being written. */
export class Attachments {
  #files = [];
  #reading = Promise.resolve();
  #numReading = 0;
  #onChange;
  #onError;

  /** `onChange` is called after every change, `onError` with the words on a file that is refused. */
  constructor(onChange, onError) {
    this.#onChange = onChange;
    this.#onError = onError;
    $("attach").addEventListener("click", () => $("attach-file").click());
    $("attach-file").addEventListener("change", ({ target }) => {
      this.add(target.files);
      target.value = "";
    });
    addEventListener("paste", (event) => {
      const files = event.clipboardData?.files;
      if (!files?.length) return;
      event.preventDefault();
      this.add(files);
    });
    this.#watchDrops();
  }

  /** Whether there are files and all of them are read. */
  get isReady() {
    return this.#files.length > 0 && !this.isReading;
  }

  get isReading() {
    return this.#numReading > 0;
  }

  /** Read files, one after the other, and add them. */
  add(files) {
    for (const file of [...files]) {
      this.#numReading++;
      this.#reading = this.#reading.then(() => this.#read(file));
    }
    this.#onChange();
  }

  /** Have these files, and no others. */
  set(files) {
    this.#files = [...files];
    this.#show();
  }

  /** The files, which are then no longer here. */
  take() {
    const files = this.#files;
    this.set([]);
    return files;
  }

  async #read(file) {
    try {
      const read = await readFile(file, this.#files);
      this.#files.push(read);
    } catch (error) {
      if (!(error instanceof FileError)) throw error;
      this.#onError(error.message);
    } finally {
      this.#numReading--;
      this.#show();
    }
  }

  #show() {
    const item = (file) => {
      const remove = () => {
        this.set(this.#files.filter((other) => other !== file));
        $("input").focus();
      };
      return el(
        "li",
        {},
        el("span", { dir: "auto" }, file.name),
        el("small", {}, sizeOf(file.size)),
        iconButton("close", `Remove “${file.name}”`, remove),
      );
    };
    $("attached").replaceChildren(...this.#files.map(item));
    $("attached").hidden = !this.#files.length;
    this.#onChange();
  }

  /** Take files that are dropped anywhere on the page, and say so while they are above it. */
  #watchDrops() {
    const isOfFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
    const mark = (isAbove) => document.body.classList.toggle("dropping", isAbove);
    addEventListener("dragover", (event) => {
      if (!isOfFiles(event)) return;
      event.preventDefault();
      mark(true);
    });
    addEventListener("dragleave", ({ relatedTarget }) => relatedTarget ?? mark(false));
    addEventListener("drop", (event) => {
      if (!isOfFiles(event)) return;
      event.preventDefault();
      mark(false);
      this.add(event.dataTransfer.files);
    });
  }
}
