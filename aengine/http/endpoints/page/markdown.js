// Markdown, lightly: text to blocks of source, blocks to nodes. A model may write anything, so that no pattern here
// backtracks over what another part of it matched, searches are remembered or counted, and nesting has a bound.

const MAX_DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+/;

/** Blocks of `text`: each has a kind, its source, and what its kind needs besides. */
function splitBlocks(text) {
  const lines = text.split(/\r?\n/);
  const blocks = [];
  let at = 0;
  const takeWhile = (test) => {
    const begin = at;
    while (at < lines.length && test(lines[at], at)) at++;
    return lines.slice(begin, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = openedFence(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      at++;
    } else if (fence) {
      at++;
      const indent = line.length - line.trimStart().length;
      const code = takeWhile((next) => !closes(fence, next)).map((next) => dedent(next, indent));
      at++;
      blocks.push({ kind: "code", language: fence.language, source: code.join("\n") });
    } else if (heading) {
      at++;
      blocks.push({ kind: "heading", level: heading[1].length, source: heading[2] });
    } else if (RULE.test(line)) {
      at++;
      blocks.push({ kind: "rule", source: "" });
    } else if (QUOTE.test(line)) {
      blocks.push({ kind: "quote", source: takeWhile((next) => QUOTE.test(next)).map((next) => next.replace(QUOTE, "")).join("\n") });
    } else if (ITEM.test(line)) {
      const first = ITEM.exec(line);
      const belongs = (next, index) =>
        indentOf(next) >= first[1].length + 2 || isSibling(first, next) || (!next.trim() && continues(first, lines, index));
      const source = takeWhile(belongs).join("\n");
      blocks.push({ kind: "list", start: parseInt(first[2], 10), source });
    } else if (opensTable(lines, at)) {
      at += 2;
      blocks.push({ kind: "table", source: [line, lines[at - 1], ...takeWhile((next) => !interrupts(next))].join("\n") });
    } else {
      at++;
      const belongs = (next, index) => !interrupts(next) && !opensTable(lines, index);
      blocks.push({ kind: "paragraph", source: [line, ...takeWhile(belongs)].join("\n") });
    }
  }
  return blocks;
}

function openedFence(line) {
  const marks = FENCE.exec(line);
  const language = marks ? line.slice(marks[0].length).trim() : "";
  return marks && !language.includes("`") ? { marks: marks[1], language } : null;
}

function closes(fence, line) {
  const text = line.trim();
  return text.length >= fence.marks.length && text === fence.marks[0].repeat(text.length);
}

const indentOf = (line) => (line.trim() ? line.length - line.trimStart().length : -1);
const dedent = (line, columns) => line.slice(Math.min(columns, line.length - line.trimStart().length));
const isOrdered = (item) => item[2].length > 1;

function isSibling(first, line) {
  const item = ITEM.exec(line);
  return item !== null && isOrdered(item) === isOrdered(first) && !RULE.test(line);
}

/** Whether the list goes on after a blank line; a wide gap ends it. */
function continues(first, lines, index) {
  const next = lines.slice(index + 1, index + 4).find((line) => line.trim());
  return next !== undefined && (indentOf(next) >= first[1].length + 2 || isSibling(first, next));
}

function interrupts(line) {
  if (!line.trim() || openedFence(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && (!isOrdered(item) || parseInt(item[2], 10) === 1);
}

function renderBlock(block, depth = 0) {
  if (depth > MAX_DEPTH) return make("p", {}, block.source);
  switch (block.kind) {
    case "code":
      return renderCode(block.source, block.language);
    case "heading":
      return make(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.source));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...splitBlocks(block.source).map((inner) => renderBlock(inner, depth + 1)));
    case "list":
      return renderList(block, depth);
    case "table":
      return renderTable(block.source);
    default:
      return make("p", {}, ...inline(block.source));
  }
}

function renderCode(source, language) {
  const code = make("code", {}, source);
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => copyText(code.textContent, button, code));
  return make("div", { className: "code" }, make("div", {}, make("span", {}, language), button), make("pre", {}, code));
}

function renderList(block, depth) {
  const lines = block.source.split("\n");
  const first = ITEM.exec(lines[0]);
  const list = make(isOrdered(first) ? "ol" : "ul");
  if (isOrdered(first)) list.start = block.start;
  const items = [];
  for (const line of lines) {
    const item = indentOf(line) < first[1].length + 2 ? ITEM.exec(line) : null;
    if (item) items.push({ width: item[0].length, lines: [line.slice(item[0].length)] });
    else items.at(-1).lines.push(dedent(line, items.at(-1).width));
  }
  for (const item of items) {
    const inner = splitBlocks(item.lines.join("\n")).map((one) => renderBlock(one, depth + 1));
    list.append(make("li", {}, ...inner));
  }
  return list;
}

const SPECIAL = /\\|`+|\*+|_+|\[|https?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const BARE_LINK = /https?:\/\/[^\s<>"`]+/y;
const WORD = /[\p{L}\p{N}_]/u;

/** What stands within one block: an array of nodes and strings. */
function inline(text, depth = 0, linked = false) {
  if (depth > MAX_DEPTH) return [text];
  const out = [];
  const found = new Map();
  const find = (mark, from) => {
    // Asked from left to right: what was found ahead still stands, and what is not there need not be sought again.
    if (!found.has(mark) || (found.get(mark) !== -1 && found.get(mark) < from)) found.set(mark, text.indexOf(mark, from));
    return found.get(mark);
  };
  let done = 0;
  let at = 0;
  const put = (node, begin, end) => {
    out.push(text.slice(done, begin), node);
    done = at = end;
  };
  for (;;) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    if (!special) break;
    const mark = special[0];
    const begin = special.index;
    at = begin + mark.length;
    if (mark === "\\") {
      if (PUNCTUATION.test(text[at] ?? "")) put(text[at], begin, at + 1);
    } else if (mark[0] === "`") {
      const end = find(mark, at);
      if (end > at) put(make("code", {}, text.slice(at, end)), begin, end + mark.length);
    } else if (mark[0] === "*" || mark[0] === "_") {
      const end = closingMark(text, mark, begin);
      if (end > 0) put(emphasis(mark, inline(text.slice(at, end), depth + 1, linked)), begin, end + mark.length);
    } else if (mark === "[") {
      const link = linked ? null : markdownLink(text, begin, find);
      if (link) put(anchor(link.href, inline(link.label, depth + 1, true)), begin, link.end);
    } else if (!linked) {
      BARE_LINK.lastIndex = begin;
      const bare = withoutTail(BARE_LINK.exec(text)?.[0] ?? "");
      const href = safeHref(bare);
      if (href) put(anchor(href, [bare]), begin, begin + bare.length);
    }
  }
  out.push(text.slice(done));
  return out;
}

/** Where the emphasis that `mark` at `begin` opens is closed; -1 where it opens none. */
function closingMark(text, mark, begin) {
  const from = begin + mark.length;
  if (mark.length > 3 || !/\S/.test(text[from] ?? "") || (mark[0] === "_" && WORD.test(text[begin - 1] ?? ""))) return -1;
  let end = from;
  for (let tries = 0; tries < 12; tries++) {
    end = text.indexOf(mark, end + 1);
    if (end === -1) return -1;
    let run = end;
    while (text[run] === mark[0]) run++;
    const fits = run - end === mark.length || (mark.length > 1 && run - end > mark.length);
    if (fits && /\S/.test(text[end - 1]) && !(mark[0] === "_" && WORD.test(text[run] ?? ""))) return run - mark.length;
    end = run - 1;
  }
  return -1;
}

function emphasis(mark, children) {
  if (mark.length === 1) return make("em", {}, ...children);
  const strong = make("strong", {}, ...children);
  return mark.length === 2 ? strong : make("em", {}, strong);
}

function markdownLink(text, begin, find) {
  const middle = find("](", begin + 1);
  if (middle === -1 || middle - begin > 500) return null;
  let end = find(")", middle + 2);
  if (end === -1 || end - middle > 2000) return null;
  if (text.slice(middle + 2, end).includes("(") && text[end + 1] === ")") end++;
  const href = safeHref(text.slice(middle + 2, end).trim().split(/\s/, 1)[0]);
  return href && { href, label: text.slice(begin + 1, middle), end: end + 1 };
}

/** The address, if it is whole and leads to the web; null for javascript:, data:, and everything else. */
function safeHref(written) {
  try {
    const url = new URL(written);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

function withoutTail(url) {
  let end = url.length;
  while (end > 0 && (".,;:!?*_'\"]".includes(url[end - 1]) || (url[end - 1] === ")" && !url.includes("(")))) end--;
  return url.slice(0, end);
}

function anchor(href, children) {
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer", referrerPolicy: "no-referrer" }, ...children);
}

/** A text that grows: blocks that stay as they were keep their nodes, so that selections and scrolling survive. */
class Prose {
  constructor(root) {
    this.root = root;
    this.blocks = [];
  }

  show(text) {
    const blocks = splitBlocks(text);
    const isSame = (a, b) => a && b && a.kind === b.kind && a.source === b.source && a.language === b.language && a.start === b.start && a.level === b.level;
    let same = 0;
    while (same < blocks.length && isSame(blocks[same], this.blocks[same])) same++;
    const [old, now] = [this.blocks[same], blocks[same]];
    if (old?.kind === "code" && now?.kind === "code" && old.language === now.language) {
      this.root.childNodes[same].querySelector("code").textContent = now.source;
      same++;
    }
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map((block) => renderBlock(block)));
    this.blocks = blocks;
  }
}
