"use strict";
// Where the user writes: the text, attached files, and the edit of an earlier message.

const DRAFT = "triforce.draft";
const MOST_BYTES = 8 << 20;
// The server rejects more characters than this for each token of the context.
const CHARACTERS_PER_TOKEN = 16;

class Composer {
  /** send: called with the text and the files; returns whether they were taken */
  constructor(send) {
    this.send = send;
    this.files = [];
    this.mostBytes = MOST_BYTES;
    // While an earlier message is edited: it, and what stood here before.
    this.edited = null;
    this.text = $("text");
    this.text.value = stored(() => sessionStorage.getItem(DRAFT), true) || "";
    this.listen();
    this.changed();
  }

  listen() {
    this.text.addEventListener("input", () => this.changed());
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("form").requestSubmit();
    });
    $("form").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    $("cancel-edit").addEventListener("click", () => this.cancelEdit());
    $("attach").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", async (event) => {
      await this.attach([...event.target.files]);
      event.target.value = "";
    });
    addEventListener("dragover", (event) => this.dragged(event, true));
    addEventListener("dragleave", (event) => this.dragged(event, event.relatedTarget !== null));
    addEventListener("drop", (event) => {
      this.dragged(event, false);
      if (event.dataTransfer && event.dataTransfer.files.length) this.attach([...event.dataTransfer.files]);
    });
  }

  dragged(event, over) {
    const files = event.dataTransfer && event.dataTransfer.types.includes("Files");
    if (files) event.preventDefault();
    $("form").classList.toggle("dropping", Boolean(files && over));
  }

  /** Limit files to what the context can hold. */
  limit(contextTokens) {
    this.mostBytes = Math.min(MOST_BYTES, contextTokens * CHARACTERS_PER_TOKEN);
    $("attach").title = `Attach text files of up to ${sized(this.mostBytes)}`;
  }

  /** Read files and keep those that are texts. */
  async attach(files) {
    for (const file of files) {
      const refused = await this.refusal(file);
      if (refused) toast(refused);
    }
    this.changed();
    this.text.focus();
  }

  /** Keep a file. Return a sentence if it cannot be attached. */
  async refusal(file) {
    if (file.size > this.mostBytes) {
      return `${file.name} has ${sized(file.size)}: a file can have at most ${sized(this.mostBytes)} here.`;
    }
    try {
      const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("binary");
      this.files.push({name: file.name, text});
      return "";
    } catch {
      return `${file.name} is not a text in UTF-8, and only those can be attached.`;
    }
  }

  submit() {
    const text = this.text.value.trim(), files = this.files;
    if (!text && !files.length) return;
    const edited = this.edited && this.edited.message;
    if (!this.send(text, files, edited)) return;
    this.edited = null;
    this.set("", []);
  }

  set(text, files) {
    this.text.value = text;
    this.files = files;
    this.changed();
  }

  edit(message) {
    const draft = this.edited ? this.edited.draft : {text: this.text.value, files: this.files};
    this.edited = {message, draft};
    this.set(message.text, [...message.files]);
    this.text.focus();
  }

  cancelEdit() {
    if (!this.edited) return;
    const {draft} = this.edited;
    this.edited = null;
    this.set(draft.text, draft.files);
    this.text.focus();
  }

  /** Show the files and fit the height to the text. */
  changed() {
    const {text} = this;
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
    $("editing").hidden = !this.edited;
    $("chips").replaceChildren(...this.files.map((file) => this.chip(file)));
    const draft = this.edited ? this.edited.draft.text : text.value;
    stored(() => sessionStorage.setItem(DRAFT, draft), true);
  }

  chip(file) {
    const remove = iconButton("remove", `Remove ${file.name}`, () => {
      this.files = this.files.filter((other) => other !== file);
      this.changed();
      this.text.focus();
    });
    const size = new Blob([file.text]).size;
    return make("li", {}, `${file.name}, ${sized(size)}`, remove);
  }
}
