"use strict";
// Markdown of answers as elements, also while they are written.

/** Return the element of a block. */
function blockElement(block, painter) {
  switch (block.kind) {
    case "fence": return fenceElement(block, painter);
    case "heading": return make(`h${Math.min(6, block.level + 2)}`, {}, inlineNodes(block.lines, painter));
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, ...block.blocks.map((each) => blockElement(each, painter)));
    case "list": return listElement(block, painter);
    case "table": return tableElement(block, painter);
    default: return make("p", {}, inlineNodes(block.lines, painter));
  }
}

const fenceText = (block) => block.lines.map((line) => line.text).join("\n");

function fenceElement(block, painter) {
  const code = make("code");
  if (painter.origins) {
    block.lines.forEach((line, index) => {
      if (index) code.append("\n");
      painter.put(code, line.text, line.at);
    });
  } else code.append(document.createTextNode(fenceText(block)));
  const copy = button("Copy", "copy-code", () => copyText(code.textContent, copy));
  const head = make("div", {className: "code-head"}, make("span", {}, block.language || "text"), copy);
  return make("div", {className: "code"}, head, make("pre", {tabIndex: 0}, code));
}

function listElement(list, painter) {
  const element = make(list.start === null ? "ul" : "ol", {className: list.loose ? "" : "tight"});
  if (list.start !== null && list.start !== 1) element.start = list.start;
  element.append(...list.items.map((item) => itemElement(item, painter)));
  return element;
}

function itemElement(item, painter) {
  const row = make("li", {}, ...item.blocks.map((block) => blockElement(block, painter)));
  if (item.checked !== null) {
    const box = make("input", {type: "checkbox", checked: item.checked, disabled: true});
    box.setAttribute("aria-label", item.checked ? "done" : "open");
    row.className = "task";
    row.prepend(box);
  }
  return row;
}

function tableElement(table, painter) {
  const row = (cells, tag) => make("tr", {}, ...table.head.map((_, column) => {
    const cell = make(tag, {}, cells[column] ? inlineNodes([cells[column]], painter) : null);
    if (table.align[column]) cell.style.textAlign = table.align[column];
    return cell;
  }));
  const body = make("tbody", {}, ...table.rows.map((cells) => row(cells, "td")));
  const head = make("thead", {}, row(table.head, "th"));
  return make("div", {className: "table", tabIndex: 0}, make("table", {}, head, body));
}

/** The elements of a text that grows. Only the last block is made anew; fences and lists are only extended. */
class MarkdownView {
  constructor(element, painter = new Painter()) {
    this.element = element;
    this.painter = painter;
    // The offset that the blocks which may still change begin at, these blocks, and their elements.
    this.settled = 0;
    this.open = [];
    this.elements = [];
  }

  /** Show a text that begins with the text shown before. */
  update(text) {
    const blocks = new BlockParser(linesOf(text, this.settled)).blocks();
    if (!blocks.length || this.extendFence(blocks)) return;
    const list = this.extendedList(blocks[0]);
    for (const element of this.elements) if (element !== list) element.remove();
    const elements = blocks.map((block, index) => (index === 0 && list) || blockElement(block, this.painter));
    this.element.append(...elements.filter((element) => element !== list));
    // Until the line that makes it a block is complete, a block may turn out to belong to the one before it.
    const last = blocks.at(-1), first = text.indexOf("\n", last.at);
    const complete = first >= 0 && (last.kind !== "table" || text.indexOf("\n", first + 1) >= 0);
    const from = Math.max(0, blocks.length - (complete ? 1 : 2));
    this.open = blocks.slice(from);
    this.elements = elements.slice(from);
    this.settled = this.open[0].at;
  }

  /** Append to a list that is still open. Return its element, or null if the block is not that list. */
  extendedList(block) {
    const [before] = this.open;
    if (!before || before.kind !== "list" || block.kind !== "list" || before.start !== block.start) return null;
    // The last item may still change, and may turn out to belong to the one before it.
    const kept = Math.min(before.items.length, block.items.length) - 2;
    if (kept < 1) return null;
    const [list] = this.elements;
    while (list.children.length > kept) list.lastChild.remove();
    list.append(...block.items.slice(kept).map((item) => itemElement(item, this.painter)));
    list.className = block.loose ? "" : "tight";
    return list;
  }

  /** Append to the text of a fence that is still open. Return whether this was all there is to show. */
  extendFence(blocks) {
    const [block] = blocks, [before] = this.open;
    const fences = blocks.length === 1 && this.open.length === 1 && block.kind === "fence" && before.kind === "fence";
    if (!fences || this.painter.origins || block.language !== before.language) return false;
    const node = this.elements[0].querySelector("code").firstChild, text = fenceText(block);
    if (!node || !text.startsWith(node.data)) return false;
    if (text.length > node.length) node.appendData(text.slice(node.length));
    return true;
  }
}

/** Show a whole text as Markdown. */
function showMarkdown(element, text, painter = new Painter()) {
  element.replaceChildren();
  new MarkdownView(element, painter).update(text);
}
