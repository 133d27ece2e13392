"use strict";
// The page: the open conversation, what the user does with it, and the start.

const EXAMPLES = [
  "Write a Python function that checks whether a word is a palindrome, and explain it in a list.",
  "Compare a list, a tuple and a set of Python in a table.",
  "What is speculative decoding? Answer in three sentences.",
];
const ABOUT = "This server runs the model with triforce-offload: context and weights that do not fit on the GPU " +
  "stream from host memory, small drafts propose tokens, and the model verifies many of them in one pass.";
// Nearer to the end than this, in pixels, the page follows an answer.
const NEAR = 80;

const talk = $("talk");
const store = new Store();
const runs = new Map();
const state = {model: "", context: 0, conversation: store.create(), views: [], follows: true, loading: ""};
// The elements of messages that have been shown, and conversations that are deleted while one is answered.
let shown = new WeakMap();
const removed = new WeakSet();
const composer = new Composer(send);
const list = new ConversationList(store, renamed, deleted);

/** Open a conversation by its id, or a new one. */
function open(id) {
  composer.cancelEdit();
  state.conversation = store.conversations.get(id) || store.create();
  showConversation();
  if (!NARROW.matches) composer.text.focus();
}

function newConversation() {
  openDrawer(false);
  if (location.hash.length > 1) location.hash = "";
  else open("");
  composer.text.focus();
}

function showConversation() {
  const {messages, title} = state.conversation;
  state.views = messages.map(viewOf);
  showRun(runs.get(state.conversation));
  talk.replaceChildren(...(messages.length ? state.views.map((view) => view.article) : [welcome()]));
  document.title = title ? `${title} - ${state.model}` : state.model || "triforce";
  list.show(state.conversation);
  showBusy();
  toEnd();
}

/** Show the conversation again with new elements. */
function showAnew() {
  shown = new WeakMap();
  showConversation();
}

function viewOf(message) {
  if (!shown.has(message)) {
    const user = message.role === "user";
    shown.set(message, user ? {article: userElement(message, () => edit(message)), message}
      : new AnswerView(message, state.context, regenerate));
  }
  return shown.get(message);
}

/** Return the first screen: the model, or how far it is loaded, and examples. */
function welcome() {
  const examples = EXAMPLES.map((text) => button(text, "example", () => {
    composer.set(text, composer.files);
    composer.text.focus();
  }));
  const about = state.model ? [
    make("h2", {}, state.model),
    make("p", {}, `A context of ${counted(state.context)} tokens. ${ABOUT}`),
    make("div", {className: "examples"}, ...examples),
  ] : [make("h2", {}, "triforce"), make("p", {id: "loading", role: "status"}, state.loading || "")];
  return make("section", {className: "welcome"}, ...about);
}

function showBusy() {
  const running = runs.has(state.conversation);
  document.body.classList.toggle("busy", running);
  $("stop").hidden = !running;
  $("send").hidden = running;
}

function toEnd() {
  state.follows = true;
  talk.scrollTop = talk.scrollHeight;
}

/** Send a message, in place of an edited one and what came after it. Return whether it was taken. */
function send(text, files, edited) {
  const {conversation} = state, {messages} = conversation;
  if (!state.model) toast("The model is not ready yet. Your message stays here until it is.");
  if (runs.has(conversation) || !state.model) return false;
  if (edited && messages.includes(edited)) messages.length = messages.indexOf(edited);
  messages.push({role: "user", text, files});
  conversation.title ||= titleOf(text || files[0].name);
  answer();
  return true;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line;
}

function edit(message) {
  if (!runs.has(state.conversation)) composer.edit(message);
}

/** Replace the last answer by another one. */
function regenerate() {
  const {conversation} = state, last = conversation.messages.at(-1);
  if (runs.has(conversation) || !last || last.role !== "assistant") return;
  conversation.messages.pop();
  answer();
}

/** Ask for the answer to the last message of the open conversation. */
async function answer() {
  const {conversation} = state, run = new Run(conversation, showRun);
  runs.set(conversation, run);
  conversation.changed = Date.now();
  keep(conversation);
  const written = run.write(state.model);
  showConversation();
  await written;
  runs.delete(conversation);
  if (!removed.has(conversation)) keep(conversation);
  viewOf(run.message).update("");
  showRun(run);
  showBusy();
  if (conversation !== state.conversation) return;
  $("said").textContent = run.message.state === "error" ? "" : "The answer is complete.";
  // The server may have another model since this page was loaded.
  if (run.status === 404) readModel().catch(() => {});
}

/** Show what a run has written, if its conversation is open. */
function showRun(run) {
  const view = state.views.at(-1);
  if (!run || run.conversation !== state.conversation || !view || view.message !== run.message) return;
  view.update(run.strip);
  if (state.follows) talk.scrollTop = talk.scrollHeight;
}

/** Keep a conversation and show it in the list. */
function keep(conversation) {
  const before = conversation.id;
  store.save(conversation);
  const open = conversation === state.conversation;
  if (open && (location.hash.slice(1) !== conversation.id || before !== conversation.id)) {
    history.replaceState(null, "", "#" + conversation.id);
  }
  list.show(state.conversation);
}

function renamed(conversation, title) {
  const {id} = conversation;
  conversation.title = title;
  store.save(conversation);
  if (id !== conversation.id) keep(conversation);
}

function deleted(conversation) {
  const run = runs.get(conversation), wasOpen = conversation === state.conversation;
  if (run) run.stop();
  removed.add(conversation);
  store.remove(conversation);
  if (wasOpen) newConversation();
  else list.show(state.conversation);
  toast(`“${conversation.title}” is deleted.`, "Undo", () => {
    removed.delete(conversation);
    store.save(conversation);
    if (wasOpen) location.hash = conversation.id;
    else list.show(state.conversation);
  });
}

/** Another tab has changed what is stored. */
function storedElsewhere(event) {
  if (event.key === SETTINGS) {
    readSettingsAgain();
    return;
  }
  if (event.key !== null && !event.key.startsWith(PREFIX)) return;
  const ids = event.key === null ? [...store.conversations.keys()] : [event.key.slice(PREFIX.length)];
  for (const id of ids) {
    const mine = store.conversations.get(id);
    // An answer that is written here is kept when it is complete.
    if (mine && runs.has(mine)) continue;
    const found = store.read(id);
    if (mine === state.conversation && mine) {
      composer.cancelEdit();
      state.conversation = found || store.create();
      showConversation();
    }
  }
  list.show(state.conversation);
}

function pressed(event) {
  if (document.querySelector("dialog[open]")) return;
  const run = runs.get(state.conversation);
  if (event.key === "Escape") {
    if (drawerOpen()) {
      openDrawer(false);
      $("menu").focus();
    } else if (run) run.stop();
    else composer.cancelEdit();
  } else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    newConversation();
  }
}

function listen() {
  addEventListener("hashchange", () => {
    const id = location.hash.slice(1);
    if (id !== state.conversation.id) open(id);
  });
  addEventListener("storage", storedElsewhere);
  addEventListener("keydown", pressed);
  addEventListener("pagehide", () => {
    for (const run of runs.values()) {
      run.stop();
      store.save(run.conversation);
    }
  });
  $("new").addEventListener("click", newConversation);
  $("stop").addEventListener("click", () => {
    const run = runs.get(state.conversation);
    if (run) run.stop();
    composer.text.focus();
  });
  $("to-end").addEventListener("click", toEnd);
  talk.addEventListener("scroll", () => {
    state.follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR;
    $("to-end").hidden = state.follows;
  });
}

/** Read the model's name and context. Raises RequestError. */
async function readModel() {
  const about = (await (await ask("v1/models")).json()).data[0];
  state.model = about.id;
  state.context = about.context_length || 0;
  $("model").textContent = about.id;
  $("context").textContent = `context of ${counted(state.context)} tokens`;
  composer.limit(state.context);
}

function sayLoading(text) {
  state.loading = text;
  $("context").textContent = text;
  if ($("loading")) $("loading").textContent = text;
}

/** Return what the server says about itself: a sentence, empty once the model is ready. */
async function healthText() {
  try {
    const health = await (await fetch("health")).json();
    if (health.status === "ok") return "";
    if (health.status === "loading") return `Loading the model, ${Math.round(100 * (health.progress || 0))} %`;
    return `The server is not ready: it reports “${health.status}”.`;
  } catch {
    return "The server does not answer.";
  }
}

async function begin() {
  beginKeyDialog();
  beginSettings((name) => { if (name === "levels") showAnew(); });
  beginDrawer();
  listen();
  open(location.hash.slice(1));
  for (let text = await healthText(); text; text = await healthText()) {
    sayLoading(text);
    await new Promise((wake) => setTimeout(wake, 500));
  }
  await connect();
}

/** Read the model and show the conversation with it. Offer another try if this fails. */
async function connect() {
  try {
    await readModel();
    showAnew();
  } catch (error) {
    sayLoading(error.message);
    talk.append(button("Try again", "retry", (event) => { event.target.remove(); connect(); }));
  }
}

begin();
