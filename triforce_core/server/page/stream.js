"use strict";
// Requests to the server: the API key, errors, and the events of a streamed answer.

const KEY = "triforce.key";
let apiKey = stored(() => sessionStorage.getItem(KEY), true) || "";
let askingForKey = null;

/** An error of the server or of the connection, with the HTTP status if there is one. */
class RequestError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a request. Ask for the API key as long as the server wants one. Raises RequestError. */
async function ask(path, options = {}) {
  for (;;) {
    const used = apiKey, headers = {"Content-Type": "application/json"};
    if (used) headers.Authorization = "Bearer " + used;
    const answer = await connected(fetch(path, {...options, headers}));
    if (answer.ok) return answer;
    const message = await errorText(answer);
    // Another request may have asked for the key meanwhile.
    if (answer.status !== 401 || (apiKey === used && !await askForKey(used, options.signal))) {
      throw new RequestError(message, answer.status);
    }
  }
}

/** Wait for the connection. Raises RequestError if there is none. */
async function connected(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server does not answer.");
  }
}

async function errorText(answer) {
  const body = parsed(await connected(answer.text()));
  if (body && body.error && isText(body.error.message)) return body.error.message;
  return `The server answers with status ${answer.status}.`;
}

/** Show the dialog for the API key. Return whether a key was given. */
function askForKey(refused, signal) {
  const dialog = $("key"), form = $("key-form");
  askingForKey ||= new Promise((give) => {
    $("key-why").textContent = refused
      ? "The server refuses this key. Enter another one."
      : "This server accepts only requests with an API key.";
    form.reset();
    dialog.showModal();
    dialog.addEventListener("close", () => {
      askingForKey = null;
      give(dialog.returnValue === "given");
    }, {once: true});
    if (signal) signal.addEventListener("abort", () => dialog.close(""), {once: true});
  });
  return askingForKey;
}

function beginKeyDialog() {
  const dialog = $("key");
  $("cancel-key").addEventListener("click", () => dialog.close(""));
  dialog.addEventListener("cancel", () => { dialog.returnValue = ""; });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey = event.target.elements.key.value.trim();
    stored(() => sessionStorage.setItem(KEY, apiKey), true);
    event.target.reset();
    dialog.close("given");
  });
}

/** Yield the events of a stream: {comment} or {chunk}. Raises RequestError if it ends too early. */
async function* streamEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await connected(reader.read());
      if (done) throw new RequestError("The connection ended before the answer did.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith(":")) yield {comment: event.slice(1).trim()};
        else if (event === "data: [DONE]") return;
        else if (event.startsWith("data: ")) yield {chunk: chunkOf(event.slice(6))};
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function chunkOf(text) {
  const chunk = parsed(text);
  if (!chunk) throw new RequestError("The server sends an event that is not JSON.");
  if (chunk.error) throw new RequestError(chunk.error.message);
  return chunk;
}
