"use strict";
// The elements of messages: what the user wrote, and answers with their reasoning and figures.

// Longer messages are folded.
const MOST_LINES = 20, MOST_CHARACTERS = 1500;

const FIGURES = {
  tokens: "Tokens of the answer, reasoning included",
  speed: "Tokens per second of decoding",
  pass: "Tokens that one pass of the model yields on average",
  drafts: "Share of the draft tokens that the model accepts",
  link: "Share of the decoding time in which the link to the device carries data",
  memory: "Device memory that was taken at most, of that which may be taken",
  context: "Tokens of the conversation, and the most that the context holds",
  first: "Time from sending to the first token",
  reused: "Prompt tokens whose KV was kept from an earlier request",
};

/** Return the element of a user's message. edit: called when the user wants to edit it */
function userElement(message, edit) {
  const article = make("article", {className: "user"});
  const body = make("div", {className: "body"});
  for (const file of message.files) body.append(fileElement(file));
  if (message.text) body.append(...foldedText(message.text));
  article.append(body, make("div", {className: "actions"}, button("Edit", "edit", edit)));
  return article;
}

function fileElement(file) {
  const shown = make("pre", {tabIndex: 0});
  const summary = make("summary", {}, `${file.name}, ${counted(file.text.length)} characters`);
  const details = make("details", {className: "file"}, summary, shown);
  details.addEventListener("toggle", () => { shown.textContent = details.open ? file.text : ""; });
  return details;
}

function foldedText(text) {
  const shown = make("div", {className: "text"}, text);
  if (text.length <= MOST_CHARACTERS && text.split("\n", MOST_LINES + 1).length <= MOST_LINES) return [shown];
  shown.classList.add("folded");
  const unfold = button("Show all", "unfold", () => {
    unfold.textContent = shown.classList.toggle("folded") ? "Show all" : "Show less";
  });
  return [shown, unfold];
}

/** The element of an answer. `update` shows what the message has gained. */
class AnswerView {
  /** again: called when the user wants another answer */
  constructor(message, context, again) {
    this.message = message;
    this.context = context;
    this.reasoning = make("div", {className: "text"});
    this.summary = make("summary");
    this.details = make("details", {className: "reasoning", hidden: true}, this.summary, this.reasoning);
    this.body = make("div", {className: "markdown"});
    this.note = make("p", {className: "note", hidden: true});
    this.figures = make("div", {className: "figures"});
    const copy = button("Copy", "copy", () => copyText(message.text, copy));
    this.again = button("Regenerate", "again", again);
    this.actions = make("div", {className: "actions"}, copy, this.again);
    this.article = make(
      "article", {className: "assistant"}, this.details, this.body, this.note, this.figures, this.actions);
    this.begin();
    this.update("");
  }

  /** Show the text from its beginning, for example because the colours have changed. */
  begin() {
    this.body.replaceChildren();
    this.markdown = new MarkdownView(this.body, new Painter(levelsShown() ? this.message.origins : null));
  }

  /** strip: what to say about an answer that is being written */
  update(strip) {
    const {message} = this;
    const writing = message.state === "writing";
    this.showReasoning(writing);
    this.markdown.update(message.text);
    this.article.classList.toggle("writing", writing);
    this.showNote();
    const figures = writing ? [["", strip]] : this.finalFigures();
    this.figures.replaceChildren(...figures.map(([name, text]) => make("span", {title: FIGURES[name] || ""}, text)));
  }

  showReasoning(writing) {
    const {message, details} = this;
    if (!message.reasoning) return;
    const thinks = writing && !message.text;
    if (details.hidden || details.classList.contains("thinks") !== thinks) details.open = thinks || !message.text;
    details.hidden = false;
    details.classList.toggle("thinks", thinks);
    const seconds = Math.round(message.reasoningSeconds || 0);
    this.summary.textContent = thinks ? "Reasoning…" : `Reasoned for ${seconds || "less than 1"} s`;
    const node = this.reasoning.firstChild;
    if (!node) this.reasoning.append(document.createTextNode(message.reasoning));
    else if (message.reasoning.length > node.length) node.appendData(message.reasoning.slice(node.length));
  }

  showNote() {
    const {state, error, text} = this.message;
    const notes = {
      stopped: text ? "Stopped" : "Stopped before the first token",
      length: "The answer ends here: it has reached the limit of tokens, or the context is full.",
      error,
    };
    this.note.hidden = !notes[state];
    if (this.note.textContent !== (notes[state] || "")) this.note.textContent = notes[state] || "";
    this.note.classList.toggle("error", state === "error");
    if (state === "error") this.note.setAttribute("role", "alert");
    this.again.textContent = state === "error" ? "Retry" : "Regenerate";
    this.actions.querySelector(".copy").hidden = !text;
  }

  /** Return the exact figures of a finished answer, each with its name. */
  finalFigures() {
    const {timings: t, firstSeconds} = this.message;
    if (!t || ![t.context_tokens, t.prompt_tokens, t.reused_tokens].every(isNumber)) return [];
    const percent = (share) => `${Math.round(100 * share)} %`;
    const total = this.context ? ` of ${counted(this.context)}` : "";
    const figures = [
      ["tokens", `${counted(t.context_tokens - t.prompt_tokens)} tokens`],
      ["speed", isNumber(t.tokens_per_second) && `${t.tokens_per_second.toFixed(1)} tokens/s`],
      ["pass", isNumber(t.tokens_per_pass) && `${t.tokens_per_pass.toFixed(1)} tokens per pass`],
      ["drafts", isNumber(t.acceptance) && `${percent(t.acceptance)} of draft tokens accepted`],
      ["link", t.link_share > 0 && `link busy ${percent(t.link_share)}`],
      ["memory", memoryText(t.device_memory_bytes, t.device_budget_bytes)],
      ["context", `context ${counted(t.context_tokens)}${total} tokens`],
      ["first", isNumber(firstSeconds) && `${firstSeconds.toFixed(1)} s to the first token`],
      ["reused", `${counted(t.reused_tokens)} of ${counted(t.prompt_tokens)} prompt tokens reused`],
    ];
    return figures.filter(([, text]) => text);
  }
}

/** budget: null if there is no limit */
function memoryText(bytes, budget) {
  if (!isNumber(bytes)) return "";
  const gib = (number) => (number / 2 ** 30).toFixed(1);
  return isNumber(budget) ? `memory ${gib(bytes)} of ${gib(budget)} GiB` : `memory ${gib(bytes)} GiB`;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
