"use strict";
// Conversations and settings in the browser's storage. Each conversation has a key of its own, so that
// tabs do not overwrite one another's. Without storage everything works until the page is closed.

const PREFIX = "triforce.conversation.";
const SETTINGS = "triforce.settings";
const noticed = new Set();

/** Call a function of a storage. Return undefined and say so once if the browser refuses. */
function stored(use, silent = false) {
  try {
    return use();
  } catch (error) {
    const full = error.name === "QuotaExceededError";
    if (!silent && !noticed.has(full)) {
      noticed.add(full);
      notice(full
        ? "The browser's storage is full: new messages are not kept. Delete conversations to make room."
        : "This browser keeps nothing for this page: conversations end when you close it.");
    }
    return undefined;
  }
}

/** Return the value of a JSON text, or null if there is none. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

const isText = (value) => typeof value === "string";

/** Return a message with all of its fields, or null if it is none. */
function validMessage(given) {
  if (!given || !["user", "assistant"].includes(given.role) || !isText(given.text)) return null;
  if (given.role === "user") {
    const files = Array.isArray(given.files) ? given.files : [];
    const texts = files.filter((file) => file && isText(file.name) && isText(file.text));
    return {role: "user", text: given.text, files: texts};
  }
  return {
    ...given,
    reasoning: isText(given.reasoning) ? given.reasoning : "",
    origins: Array.isArray(given.origins) ? given.origins.filter((run) => Array.isArray(run) && run[0] > 0) : [],
    timings: given.timings && typeof given.timings === "object" ? given.timings : null,
    // The page was closed while the answer was written.
    state: given.state === "writing" ? "stopped" : String(given.state),
  };
}

/** Return a conversation from its JSON text, or null if the text is broken. */
function validConversation(text) {
  const given = parsed(text);
  if (!given || !isText(given.id) || !isText(given.title) || !Array.isArray(given.messages)) return null;
  const messages = given.messages.map(validMessage);
  if (messages.includes(null)) return null;
  return {id: given.id, title: given.title, changed: Number(given.changed) || 0, revision: given.revision, messages};
}

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

class Store {
  constructor() {
    this.conversations = new Map();
    // The revisions that this tab has read or written, by the conversation's id.
    this.revisions = new Map();
    this.readAll();
  }

  readAll() {
    const keys = stored(() => Object.keys(localStorage)) || [];
    for (const key of keys) if (key.startsWith(PREFIX)) this.read(key.slice(PREFIX.length));
  }

  /** Read a conversation again. Return it, or null if it is gone or broken. */
  read(id) {
    const found = validConversation(stored(() => localStorage.getItem(PREFIX + id), true));
    if (found && found.id === id) {
      this.conversations.set(id, found);
      this.revisions.set(id, found.revision);
      return found;
    }
    this.conversations.delete(id);
    this.revisions.delete(id);
    return null;
  }

  /** All conversations, the last changed first. */
  all() {
    return [...this.conversations.values()].sort((a, b) => b.changed - a.changed);
  }

  create() {
    return {id: newId(), title: "", changed: 0, revision: "", messages: []};
  }

  /** Keep a conversation. If another tab has changed it since this tab read it, keep a copy beside it. */
  save(conversation) {
    const other = parsed(stored(() => localStorage.getItem(PREFIX + conversation.id), true));
    if (other && other.revision !== this.revisions.get(conversation.id)) {
      this.conversations.delete(conversation.id);
      this.read(conversation.id);
      conversation.id = newId();
      conversation.title += " (copy)";
    }
    conversation.revision = newId();
    this.conversations.set(conversation.id, conversation);
    const text = JSON.stringify(conversation);
    if (stored(() => { localStorage.setItem(PREFIX + conversation.id, text); return true; })) {
      this.revisions.set(conversation.id, conversation.revision);
    }
  }

  remove(conversation) {
    this.conversations.delete(conversation.id);
    this.revisions.delete(conversation.id);
    stored(() => localStorage.removeItem(PREFIX + conversation.id), true);
  }
}

/** Return the settings as they are kept: texts by name, without empty ones. */
function readSettings() {
  const given = parsed(stored(() => localStorage.getItem(SETTINGS), true));
  const entries = Object.entries(given && typeof given === "object" ? given : {});
  return Object.fromEntries(entries.filter(([, value]) => isText(value) && value !== ""));
}

function writeSettings(settings) {
  stored(() => localStorage.setItem(SETTINGS, JSON.stringify(settings)));
}
