"use strict";
// The list of conversations: a sidebar, and a drawer on narrow screens.

const NARROW = matchMedia("(max-width: 48rem)");

function openDrawer(open) {
  $("drawer").classList.toggle("open", open);
  $("shade").hidden = !open;
  $("menu").setAttribute("aria-expanded", String(open));
  $("room").inert = open;
  if (open) $("new").focus();
}

const drawerOpen = () => NARROW.matches && $("drawer").classList.contains("open");

class ConversationList {
  /** renamed: called with a conversation and its new title; deleted: called with a conversation */
  constructor(store, renamed, deleted) {
    this.store = store;
    this.renamed = renamed;
    this.deleted = deleted;
    this.renaming = null;
  }

  show(current) {
    if (this.renaming) return;
    const rows = this.store.all().map((conversation) => this.row(conversation, conversation === current));
    $("list").replaceChildren(...rows);
  }

  row(conversation, current) {
    const title = conversation.title || "Untitled";
    const link = make("a", {href: "#" + conversation.id, title}, title);
    if (current) link.setAttribute("aria-current", "page");
    const row = make("li", {className: current ? "current" : ""}, link);
    row.append(
      iconButton("rename", `Rename ${title}`, () => this.rename(conversation, row)),
      iconButton("delete", `Delete ${title}`, () => this.deleted(conversation)),
    );
    return row;
  }

  rename(conversation, row) {
    const input = make("input", {value: conversation.title, maxLength: 200});
    input.setAttribute("aria-label", "Title");
    this.renaming = conversation;
    const end = (keep) => {
      if (this.renaming !== conversation) return;
      this.renaming = null;
      const title = input.value.trim();
      if (keep && title && title !== conversation.title) this.renamed(conversation, title);
      // The other rows stay: one of them may be what the user clicks now.
      const renewed = this.row(conversation, row.classList.contains("current"));
      row.replaceWith(renewed);
      return renewed;
    };
    input.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter").querySelector("a").focus();
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.select();
  }
}

function beginDrawer() {
  $("menu").addEventListener("click", () => openDrawer(!drawerOpen()));
  NARROW.addEventListener("change", () => openDrawer(false));
  $("shade").addEventListener("click", () => openDrawer(false));
  $("list").addEventListener("click", (event) => {
    if (event.target.closest("a")) openDrawer(false);
  });
}
