"use strict";
// The settings: a dialog, the fields of a request that they give, and the page's colours.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
let settings = readSettings();

/** Return the fields of a request that the settings give. Empty settings give none. */
function requestFields() {
  const fields = {};
  for (const name of NUMBERS) {
    const value = Number(settings[name]);
    if (settings[name] !== undefined && Number.isFinite(value)) fields[name] = value;
  }
  if (settings.reasoning) fields.chat_template_kwargs = {enable_thinking: settings.reasoning === "on"};
  return fields;
}

function applySettings() {
  document.documentElement.dataset.theme = settings.theme || "auto";
  const levels = settings.levels === "on";
  $("legend").hidden = !levels;
  $("talk").classList.toggle("tint", levels);
}

const levelsShown = () => settings.levels === "on";

function fillSettings() {
  for (const field of $("settings-form").elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") field.checked = settings[field.name] === "on";
    else field.value = settings[field.name] || "";
  }
}

/** Take over one field as soon as it is changed, unless its value is out of range. */
function takeSetting(field, changed) {
  if (!field.checkValidity()) return;
  const value = field.type === "checkbox" ? (field.checked ? "on" : "") : field.value;
  if (value.trim()) settings[field.name] = value;
  else delete settings[field.name];
  writeSettings(settings);
  applySettings();
  changed(field.name);
}

/** changed: called with the name of each setting that changes */
function beginSettings(changed) {
  const dialog = $("settings"), form = $("settings-form");
  applySettings();
  $("open-settings").addEventListener("click", () => { fillSettings(); dialog.showModal(); });
  form.addEventListener("change", (event) => takeSetting(event.target, changed));
  form.addEventListener("submit", (event) => { event.preventDefault(); dialog.close(); });
  $("reset-settings").addEventListener("click", () => {
    settings = {};
    writeSettings(settings);
    fillSettings();
    applySettings();
    changed("levels");
  });
}

function readSettingsAgain() {
  settings = readSettings();
  applySettings();
}
