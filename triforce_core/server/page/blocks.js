"use strict";
// The blocks of a Markdown text: paragraphs, headings, rules, fences, quotes, lists and tables.

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-*+]|(\d{1,9})([.)]))( {1,4}(?! )| +|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const TASK = /^\[([ xX])\] /;
// Quotes and lists inside one another; what is deeper is shown as paragraphs.
const MOST_DEEP = 10;

/** Return the lines of a text from an offset on, with their offsets. */
function linesOf(text, from) {
  const lines = [];
  for (let at = from; at <= text.length;) {
    let end = text.indexOf("\n", at);
    if (end < 0) end = text.length;
    let line = text.slice(at, end);
    if (line.endsWith("\r")) line = line.slice(0, -1);
    if (line.includes("\t")) line = line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
    lines.push({text: line, at});
    at = end + 1;
  }
  return lines;
}

const isBlank = (line) => !line.text.trim();
const indentOf = (line) => line.text.length - line.text.trimStart().length;
const cut = (line, count) => ({text: line.text.slice(count), at: line.at + count});

function fenceOf(line) {
  const found = FENCE.exec(line.text);
  // A line with further backticks is inline code.
  return found && !(found[2][0] === "`" && found[3].includes("`")) ? found : null;
}

/** Return what begins a list item: its indent, the width up to its text, and its kind. */
function markerOf(line) {
  const found = !RULE.test(line.text) && MARKER.exec(line.text);
  if (!found) return null;
  const spaces = Math.min(Math.max(found[5].length, 1), 4);
  return {
    indent: found[1].length,
    width: found[1].length + found[2].length + spaces,
    kind: found[4] || found[2],
    number: found[3] === undefined ? null : Number(found[3]),
    empty: found[0].length === line.text.length,
  };
}

/** Whether a line ends the paragraph before it. */
function interrupts(line) {
  if (HEADING.test(line.text) || RULE.test(line.text) || QUOTE.test(line.text) || fenceOf(line)) return true;
  const marker = markerOf(line);
  return marker !== null && !marker.empty && (marker.number === null || marker.number === 1);
}

/** Return the cells of a table's row as lines. */
function cellsOf(line) {
  const cells = [], text = line.text;
  const end = /(?<!\\)\|[ \t]*$/.test(text) ? text.lastIndexOf("|") : text.length;
  let from = /^[ \t]*\|/.test(text) ? text.indexOf("|") + 1 : 0;
  for (let at = from; at <= end; at++) {
    if (at < end && text[at] === "\\") at += 1;
    else if (at >= end || text[at] === "|") {
      const cell = text.slice(from, at), start = cell.length - cell.trimStart().length;
      cells.push({text: cell.trim().replaceAll("\\|", "|"), at: line.at + from + start});
      from = at + 1;
    }
  }
  return cells;
}

class BlockParser {
  constructor(lines, depth = 0) {
    this.lines = lines;
    this.depth = depth;
    this.index = 0;
    // Whether a blank line stands between two of the blocks.
    this.spaced = false;
  }

  get line() {
    return this.lines[this.index];
  }

  /** Return all blocks, each with its kind and the offset `at` of its first line. */
  blocks() {
    const found = [];
    while (this.index < this.lines.length) {
      if (isBlank(this.line)) this.index += 1;
      else {
        if (found.length && isBlank(this.lines[this.index - 1])) this.spaced = true;
        const at = this.line.at;
        found.push({...this.next(), at});
      }
    }
    return found;
  }

  next() {
    const nested = this.depth < MOST_DEEP;
    return this.fence() || this.heading() || this.rule() || (nested && (this.quote() || this.list())) ||
      this.table() || this.paragraph();
  }

  fence() {
    const opened = fenceOf(this.line);
    if (!opened) return null;
    const [, indent, marks, info] = opened, lines = [];
    for (this.index += 1; this.index < this.lines.length; this.index++) {
      const text = this.line.text.trim();
      if (text.length >= marks.length && text === marks[0].repeat(text.length) && indentOf(this.line) < 4) {
        this.index += 1;
        break;
      }
      lines.push(cut(this.line, Math.min(indent.length, indentOf(this.line))));
    }
    return {kind: "fence", language: info.trim().split(/\s/)[0], lines};
  }

  heading() {
    const found = HEADING.exec(this.line.text);
    if (!found) return null;
    const line = cut(this.line, found[0].length);
    line.text = line.text.replace(/(?:^|[ \t])#+[ \t]*$/, "").trimEnd();
    this.index += 1;
    return {kind: "heading", level: found[1].length, lines: [line]};
  }

  rule() {
    if (!RULE.test(this.line.text)) return null;
    this.index += 1;
    return {kind: "rule"};
  }

  quote() {
    if (!QUOTE.test(this.line.text)) return null;
    const lines = [];
    for (; this.index < this.lines.length; this.index++) {
      const found = QUOTE.exec(this.line.text);
      if (found) lines.push(cut(this.line, found[0].length));
      else if (isBlank(this.line) || isBlank(lines.at(-1)) || interrupts(this.line)) break;
      else lines.push(this.line);
    }
    return {kind: "quote", blocks: new BlockParser(lines, this.depth + 1).blocks()};
  }

  list() {
    const first = markerOf(this.line);
    if (!first) return null;
    const list = {kind: "list", start: first.number, items: [], loose: false};
    for (let marker = first; marker && marker.kind === first.kind;) {
      const item = this.item(marker), end = this.index;
      list.items.push(item);
      list.loose ||= item.spaced;
      while (this.index < this.lines.length && isBlank(this.line)) this.index += 1;
      marker = this.index < this.lines.length ? markerOf(this.line) : null;
      if (!marker || marker.kind !== first.kind) this.index = end;
      else list.loose ||= this.index > end;
    }
    return list;
  }

  /** Take the lines of one item. Lines that are indented by two more than its marker belong to it. */
  item(marker) {
    const lines = [cut(this.line, Math.min(marker.width, this.line.text.length))];
    let blank = false;
    for (this.index += 1; this.index < this.lines.length; this.index++) {
      const indent = indentOf(this.line), empty = isBlank(this.line);
      if (empty) lines.push(this.line);
      else if (indent >= Math.min(marker.width, marker.indent + 2)) {
        lines.push(cut(this.line, Math.min(indent, marker.width)));
      } else if (blank || interrupts(this.line) || markerOf(this.line)) break;
      else lines.push(this.line);
      blank = empty;
    }
    while (lines.length > 1 && isBlank(lines.at(-1))) {
      lines.pop();
      this.index -= 1;
    }
    const task = TASK.exec(lines[0].text);
    if (task) lines[0] = cut(lines[0], task[0].length);
    const parser = new BlockParser(lines, this.depth + 1), blocks = parser.blocks();
    return {blocks, spaced: parser.spaced, checked: task ? task[1] !== " " : null};
  }

  startsTable() {
    const rule = this.lines[this.index + 1];
    return rule !== undefined && this.line.text.includes("|") && TABLE_RULE.test(rule.text) &&
      cellsOf(this.line).length === cellsOf(rule).length;
  }

  table() {
    if (!this.startsTable()) return null;
    const head = cellsOf(this.line), rows = [];
    const align = cellsOf(this.lines[this.index + 1]).map(({text}) => {
      if (text.endsWith(":")) return text.startsWith(":") ? "center" : "right";
      return "";
    });
    for (this.index += 2; this.index < this.lines.length; this.index++) {
      if (!this.line.text.includes("|") || interrupts(this.line)) break;
      rows.push(cellsOf(this.line));
    }
    return {kind: "table", head, align, rows};
  }

  paragraph() {
    const lines = [];
    do {
      lines.push(cut(this.line, indentOf(this.line)));
      this.index += 1;
    } while (this.index < this.lines.length && !isBlank(this.line) && !interrupts(this.line) && !this.startsTable());
    lines[lines.length - 1].text = lines.at(-1).text.trimEnd();
    return {kind: "paragraph", lines};
  }
}
