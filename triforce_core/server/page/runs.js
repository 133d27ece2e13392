"use strict";
// Answers that are being written. Each goes on while the user looks at another conversation.

// Re-rendering takes at most a quarter of the time.
const REST_FOR_EACH_RENDERING = 3;
/** Return the messages of a request: texts with their files, without answers that failed. */
function requestMessages(messages) {
  const sent = settings.system ? [{role: "system", content: settings.system}] : [];
  messages.forEach((message, index) => {
    const next = messages[index + 1];
    if (message.role === "assistant") {
      if (message.text) sent.push({role: "assistant", content: message.text});
    } else if (!next || next.state !== "error" || next.text) {
      const content = contentOf(message), last = sent.at(-1);
      // Chat templates want an answer between two messages of the user.
      if (last && last.role === "user") last.content += "\n\n" + content;
      else sent.push({role: "user", content});
    }
  });
  return sent;
}

function contentOf({text, files}) {
  return [...files.map((file) => `${file.name}:\n\n${file.text.trimEnd()}`), text].filter(Boolean).join("\n\n");
}

class Run {
  /** show: called with the run at most once for each frame, when there is more to show */
  constructor(conversation, show) {
    this.conversation = conversation;
    this.show = show;
    this.message = {role: "assistant", text: "", reasoning: "", origins: [], timings: null, state: "writing"};
    this.controller = new AbortController();
    this.asked = performance.now();
    this.status = "waiting for the server";
    this.tokens = this.firstTokens = this.passes = 0;
    this.first = this.reasoned = null;
    this.frame = 0;
    this.nextFrame = 0;
  }

  /** Ask for the answer and write it into the message. Errors become the message's state. */
  async write(model) {
    const {message, conversation} = this;
    const body = {model, messages: requestMessages(conversation.messages), stream: true, ...requestFields()};
    conversation.messages.push(message);
    try {
      const options = {method: "POST", signal: this.controller.signal, body: JSON.stringify(body)};
      const answer = await ask("v1/chat/completions", options);
      for await (const event of streamEvents(answer.body)) {
        if (event.comment !== undefined) this.progress(event.comment);
        else this.take(event.chunk);
        this.changed();
      }
      message.state = message.finish === "length" ? "length" : "done";
    } catch (error) {
      // A page that is left may report its aborted connection as a failed one.
      message.state = this.controller.signal.aborted ? "stopped" : "error";
      if (message.state === "error") message.error = error.message;
      this.status = error.status;
    } finally {
      cancelAnimationFrame(this.frame);
      this.endReasoning();
      delete message.finish;
    }
  }

  stop() {
    this.controller.abort();
  }

  /** A comment of the server says which share of the prompt is processed. */
  progress(comment) {
    const share = parseFloat(comment);
    if (this.first !== null || !(share >= 0)) return;
    this.status = share < 1 ? `processing the prompt, ${Math.round(100 * share)} %` : "waiting for the first token";
  }

  take(chunk) {
    const {message} = this, choice = chunk.choices && chunk.choices[0];
    const delta = (choice && choice.delta) || {};
    const text = delta.content || "", reasoning = delta.reasoning_content || "";
    if (text || reasoning) this.count(chunk.so_far || {tokens: this.tokens, passes: this.passes});
    if (reasoning) {
      this.reasoned ??= performance.now();
      message.reasoning += reasoning;
    }
    if (text) {
      this.endReasoning();
      message.text += text;
      addOrigin(message.origins, text.length, chunk.origin || "plain");
    }
    if (choice && choice.finish_reason) message.finish = choice.finish_reason;
    if (chunk.timings) message.timings = chunk.timings;
  }

  /** Note how many tokens and passes there are so far. */
  count({tokens, passes}) {
    [this.tokens, this.passes] = [tokens, passes];
    if (this.first !== null) return;
    this.first = performance.now();
    this.firstTokens = this.tokens;
    this.message.firstSeconds = (this.first - this.asked) / 1000;
  }

  endReasoning() {
    if (this.reasoned === null || this.message.reasoningSeconds !== undefined) return;
    this.message.reasoningSeconds = (performance.now() - this.reasoned) / 1000;
  }

  /** What to say about the answer while it is written. */
  get strip() {
    if (this.first === null) return this.status;
    const seconds = (performance.now() - this.first) / 1000;
    const rate = seconds > 0.5 ? `, ${((this.tokens - this.firstTokens) / seconds).toFixed(1)} tokens/s` : "";
    // The first token comes from the prompt.
    const each = this.passes ? `, ${((this.tokens - 1) / this.passes).toFixed(1)} tokens per pass` : "";
    return `${counted(this.tokens)} tokens${rate}${each}`;
  }

  /** Show the message in the next frame, and later if showing it takes long. */
  changed() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const began = performance.now();
      if (began < this.nextFrame) return this.changed();
      this.show(this);
      const ended = performance.now();
      this.nextFrame = ended + REST_FOR_EACH_RENDERING * (ended - began);
    });
  }
}

/** Add a run of characters to origins, as a Painter takes them. */
function addOrigin(origins, length, origin) {
  const last = origins.at(-1);
  if (last && last[1] === origin) last[0] += length;
  else origins.push([length, origin]);
}
