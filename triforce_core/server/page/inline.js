"use strict";
// Inline Markdown as DOM nodes. The model's text is untrusted: it enters the document as text nodes only,
// and links lead to http, https and mailto alone. Every step takes time linear in the text.

const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPECIAL = /[\\`*_~[\]<\n]|!\[|https?:\/\//g;
const DESTINATION = new RegExp(
  "\\(\\s*(?:<([^<>\\n]{0,4000})>|((?:[^\\s()\\\\]|\\\\.|\\((?:[^\\s()\\\\]|\\\\.){0,500}\\)){0,4000}))" +
  "(?:\\s+(?:\"[^\"]{0,500}\"|'[^']{0,500}'))?\\s*\\)", "y");
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,4000})>/y;
const BREAK = /<br\s{0,9}\/?>/iy;
const BARE_URL = /https?:\/\/[^\s<>[\]`*"|\\]{1,4000}/y;
// How deep emphasis nests, how many open delimiters a closing one is compared with, and open brackets.
const MOST_NESTED = 12, MOST_COMPARED = 50, MOST_BRACKETS = 20;

/** Return the address of a link as it may be followed, or null. */
function safeAddress(text) {
  try {
    const url = new URL(text.replace(/\\([!-/:-@[-`{-~])/g, "$1"));
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Return an address without the punctuation that ends the sentence around it. */
function withoutEnd(address) {
  const ends = address.includes("(") ? ".,;:!?'_~" : ".,;:!?'_~)";
  let length = address.length;
  while (length && ends.includes(address[length - 1])) length -= 1;
  return address.slice(0, length);
}

function linkTo(href) {
  return make("a", {href, title: href, target: "_blank", rel: "noopener noreferrer"});
}

/** Puts text into the document, coloured by its origins if there are any.
 *
 * origins: [number of characters, origin] of each run of the source
 */
class Painter {
  constructor(origins = null) {
    this.origins = origins;
    this.ends = [];
  }

  /** at: the offset of the text in the source */
  put(parent, text, at) {
    if (!text) return;
    if (!this.origins) {
      parent.append(document.createTextNode(text));
      return;
    }
    let from = 0;
    for (let run = this.runAt(at); from < text.length; run++) {
      const end = run < this.ends.length ? Math.max(from, this.ends[run] - at) : text.length;
      if (end > from) parent.append(make("span", {className: this.classOf(run)}, text.slice(from, end)));
      from = end;
    }
  }

  classOf(run) {
    const origin = this.origins[run] && this.origins[run][1];
    return ["accepted", "corrected", "bonus"].includes(origin) ? origin : "plain-text";
  }

  /** Return the index of the run that an offset is in. */
  runAt(at) {
    // The last run may have grown.
    this.ends.pop();
    for (let run = this.ends.length; run < this.origins.length; run++) {
      this.ends.push((run ? this.ends[run - 1] : 0) + this.origins[run][0]);
    }
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > at) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** Return the nodes of inline Markdown.
 *
 * lines: {text, at}, with the offset of each line's text in the source
 */
function inlineNodes(lines, painter) {
  return new InlineParser(lines, painter).parse();
}

class InlineParser {
  constructor(lines, painter) {
    this.lines = lines;
    this.painter = painter;
    this.text = lines.map((line) => line.text).join("\n");
    this.root = document.createDocumentFragment();
    this.at = this.from = 0;
    // The line that plain text is put from, and its start in the text.
    this.line = this.lineStart = 0;
    this.delimiters = [];
    this.brackets = [];
    this.ticks = null;
  }

  parse() {
    for (;;) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(this.text);
      if (!found) break;
      this.at = found.index;
      this.take(found[0]);
    }
    this.flush(this.text.length);
    this.pair(0);
    return this.root;
  }

  take(special) {
    switch (special) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "\n": return this.newline();
      case "<": return this.angle();
      case "[": case "![": return this.open(special);
      case "]": return this.close();
      case "*": case "_": case "~": return this.delimiter(special);
      default: return this.url(special);
    }
  }

  /** Put the text since the last node, up to `end`. */
  flush(end) {
    this.put(this.root, this.from, end);
    this.from = end;
  }

  put(parent, from, end) {
    while (this.lineStart + this.lines[this.line].text.length < from) {
      this.lineStart += this.lines[this.line].text.length + 1;
      this.line += 1;
    }
    this.painter.put(parent, this.text.slice(from, end), this.lines[this.line].at + from - this.lineStart);
  }

  /** Append a node for the text from `this.at` to `end`. */
  node(node, end) {
    this.flush(this.at);
    this.root.append(node);
    this.at = this.from = end;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n" || /[!-/:-@[-`{-~]/.test(next || "")) {
      this.flush(this.at);
      this.from = this.at + 1;
    }
    this.at += next === "\n" ? 1 : 2;
  }

  code() {
    const length = this.runLength("`"), end = this.closingTicks(length);
    if (end < 0) {
      this.at += length;
      return;
    }
    this.flush(this.at);
    let from = this.at + length, to = end;
    const inside = this.text.slice(from, to);
    if (/^[ \n].*[ \n]$/s.test(inside) && inside.trim()) { from += 1; to -= 1; }
    const code = document.createElement("code");
    this.put(code, from, to);
    this.node(code, end + length);
  }

  /** Return where the next run of `length` backticks begins, or -1. */
  closingTicks(length) {
    if (!this.ticks) {
      this.ticks = new Map();
      for (const {0: run, index} of this.text.matchAll(/`+/g)) {
        if (!this.ticks.has(run.length)) this.ticks.set(run.length, []);
        this.ticks.get(run.length).push(index);
      }
      for (const found of this.ticks.values()) found.reverse();
    }
    const found = this.ticks.get(length) || [];
    while (found.length && found.at(-1) <= this.at) found.pop();
    return found.length ? found.at(-1) : -1;
  }

  runLength(character) {
    let end = this.at;
    while (this.text[end] === character) end += 1;
    return end - this.at;
  }

  newline() {
    let end = this.at;
    while (end > this.from && this.text[end - 1] === " ") end -= 1;
    this.flush(end);
    this.root.append(document.createElement("br"));
    this.at += 1;
    while (this.text[this.at] === " ") this.at += 1;
    this.from = this.at;
  }

  matched(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  angle() {
    const link = this.matched(AUTOLINK), href = link && safeAddress(link[1]);
    const newline = this.matched(BREAK);
    if (href) {
      const anchor = linkTo(href);
      anchor.textContent = link[1];
      this.node(anchor, this.at + link[0].length);
    } else if (newline) this.node(document.createElement("br"), this.at + newline[0].length);
    else this.at += 1;
  }

  url(special) {
    const found = this.matched(BARE_URL);
    if (!found || /\w/.test(this.text[this.at - 1] || "")) {
      this.at += special.length;
      return;
    }
    const text = withoutEnd(found[0]), href = safeAddress(text);
    if (!href) {
      this.at += special.length;
      return;
    }
    const anchor = linkTo(href);
    this.flush(this.at);
    this.put(anchor, this.at, this.at + text.length);
    this.node(anchor, this.at + text.length);
  }

  open(mark) {
    const node = document.createTextNode(mark);
    this.brackets.push({node, image: mark === "![", delimiters: this.delimiters.length});
    if (this.brackets.length > MOST_BRACKETS) this.brackets.shift();
    this.node(node, this.at + mark.length);
  }

  /** Make a link of what stands since the last open bracket, if an address follows. Images become links. */
  close() {
    const bracket = this.brackets.pop();
    this.at += 1;
    if (!bracket) return;
    const found = this.text[this.at] === "(" && this.matched(DESTINATION);
    const href = found && safeAddress(found[1] === undefined ? found[2] : found[1]);
    if (!href) return;
    this.flush(this.at - 1);
    this.pair(bracket.delimiters);
    const anchor = linkTo(href);
    this.wrap(anchor, bracket.node, null);
    bracket.node.remove();
    for (const inner of anchor.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
    if (!anchor.textContent) anchor.textContent = href;
    if (!bracket.image) this.brackets = [];
    this.at = this.from = this.at + found[0].length;
  }

  delimiter(character) {
    const count = this.runLength(character), end = this.at + count;
    const before = this.text[this.at - 1] || " ", after = this.text[end] || " ";
    if (character === "~" ? count !== 2 : count > 3) {
      this.at = end;
      return;
    }
    const leads = opensBetween(before, after), trails = opensBetween(after, before);
    const word = character === "_";
    const node = document.createTextNode(this.text.slice(this.at, end));
    this.delimiters.push({
      node, character, count, length: count,
      opens: leads && (!word || !trails || PUNCTUATION.test(before)),
      closes: trails && (!word || !leads || PUNCTUATION.test(after)),
    });
    this.node(node, end);
  }

  /** Make emphasis of the delimiters from an index on, as CommonMark pairs them. */
  pair(bottom) {
    const openers = [];
    for (const closer of this.delimiters.splice(bottom)) {
      while (closer.closes && closer.count) {
        const index = openerOf(openers, closer);
        if (index < 0) break;
        openers.length = index + 1;
        if (!this.emphasise(openers[index], closer)) {
          openers.length = 0;
          break;
        }
        if (!openers[index].count) openers.pop();
      }
      if (closer.opens && closer.count) openers.push(closer);
    }
  }

  emphasise(opener, closer) {
    const used = Math.min(opener.count, closer.count, 2);
    const tag = opener.character === "~" ? "del" : used === 2 ? "strong" : "em";
    const element = document.createElement(tag);
    if (!this.wrap(element, opener.node, closer.node)) return false;
    for (const end of [opener, closer]) {
      end.count -= used;
      end.node.data = end.node.data.slice(used);
      if (!end.count) end.node.remove();
    }
    return true;
  }

  /** Move the nodes between two into an element, unless it would nest too deeply. */
  wrap(element, first, last) {
    const moved = [];
    let depth = 1;
    for (let node = first.nextSibling; node !== last; node = node.nextSibling) {
      moved.push(node);
      depth = Math.max(depth, 1 + (node.depth || 0));
    }
    if (last && depth > MOST_NESTED) return false;
    element.depth = depth;
    element.append(...moved);
    first.after(element);
    return true;
  }
}

/** Whether a delimiter can open emphasis between two characters. */
function opensBetween(before, after) {
  return !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
}

/** Return the index of the last opener that a closing delimiter fits, or -1. */
function openerOf(openers, closer) {
  const end = Math.max(0, openers.length - MOST_COMPARED);
  for (let index = openers.length - 1; index >= end; index--) {
    const opener = openers[index];
    if (opener.character !== closer.character) continue;
    const sum = opener.length + closer.length;
    const odd = (opener.closes || closer.opens) && sum % 3 === 0 && opener.length % 3 !== 0;
    if (!odd) return index;
  }
  return -1;
}
