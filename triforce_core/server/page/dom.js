"use strict";
// Small helpers for the document.

const $ = (id) => document.getElementById(id);

/** Return a new element. Properties are set as they are; children are nodes or texts. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", "#icon-" + name);
  svg.append(use);
  return svg;
}

/** Return a button with a text. */
function button(text, className, onclick) {
  return make("button", {type: "button", className, onclick}, text);
}

/** Return a button that shows an icon and has a name for screen readers. */
function iconButton(name, label, onclick) {
  const made = make("button", {type: "button", className: "icon", title: label, onclick}, icon(name));
  made.setAttribute("aria-label", label);
  return made;
}

/** Show a sentence below the conversation until it is closed. Return its element. */
function notice(text) {
  const shown = make("div", {className: "toast"}, make("span", {}, text));
  shown.append(iconButton("remove", "Close", () => shown.remove()));
  $("toasts").append(shown);
  return shown;
}

/** Show a sentence for ten seconds, with a button if it offers an action. */
function toast(text, action = "", act = null) {
  const shown = notice(text);
  if (act) shown.lastChild.before(button(action, "", () => { shown.remove(); act(); }));
  setTimeout(() => shown.remove(), 10000);
}

/** Copy a text. Without a secure context browsers offer only the selection. */
async function copyText(text, pressed) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", {value: text, className: "unseen"});
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
  }
  const label = pressed.textContent;
  if (label === "Copied" || label === "Not copied") return;
  pressed.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => { pressed.textContent = label; }, 1500);
}

const counted = (number) => number.toLocaleString("en");

/** Return a size as text, in units of 1024 bytes. */
function sized(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 1 << 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`;
}
