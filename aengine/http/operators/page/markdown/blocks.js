// Markdown's block structure: text to a list of headings, paragraphs, lists and so on. Follows CommonMark and GFM.
// A text may be made to be slow to parse. So no pattern backtracks over another part's match, and no search is repeated.

/**
 * A block and its source without the marks of its kind.
 * @typedef {{kind: string, source: string, info: string | number}} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const UNDERLINE = /^ {0,3}(?:=+|--+)[ \t]*$/; // with one dash, the beginning of a streamed list would look like a heading
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const NOTE = /^ {0,3}\[\^([^\]\s]{1,100})\]:[ \t]*/;
const DEFINITION = /^ {0,3}\[([^[\]]{1,500})\]:[ \t]*<?([^\s<>]+)>?(?:[ \t]+(?:"[^"]*"|'[^']*'|\([^()]*\)))?[ \t]*$/;
const TAB = 4;
const MAX_DEPTH = 12; // of blocks in blocks

const isBlank = (line) => !/[^ \t]/.test(line);

/** The columns of leading white space in `line`. */
function indentOf(line) {
  let columns = 0;
  for (const sign of line) {
    if (sign === " ") columns++;
    else if (sign === "\t") columns += TAB - (columns % TAB);
    else break;
  }
  return columns;
}

/** `line` without up to `columns` columns of leading white space. */
function dedent(line, columns) {
  let at = 0;
  let gone = 0;
  while (gone < columns && (line[at] === " " || line[at] === "\t")) gone += line[at++] === " " ? 1 : TAB - (gone % TAB);
  return " ".repeat(Math.max(0, gone - columns)) + line.slice(at);
}

/** @returns {{marks: string, language: string} | null} */
function openedFence(line) {
  const marks = FENCE.exec(line);
  const language = marks ? line.slice(marks[0].length).trim() : "";
  return marks && !(marks[1][0] === "`" && language.includes("`")) ? { marks: marks[1], language } : null;
}

function closes(fence, line) {
  const text = line.trim();
  return text.length >= fence.marks.length && text === fence.marks[0].repeat(text.length);
}

/**
 * The item of a list that `line` opens. `width` is the column at which its text begins.
 * @returns {{indent: number, mark: string, width: number, text: string} | null}
 */
function itemOf(line) {
  const found = ITEM.exec(line);
  if (!found || RULE.test(line)) return null;
  const [marked, white, mark] = found;
  const rest = line.slice(marked.length);
  const spaces = indentOf(rest);
  const gap = isBlank(rest) || spaces > 4 ? 1 : spaces;
  const indent = indentOf(white);
  return { indent, mark, width: indent + mark.length + gap, text: dedent(rest, gap) };
}

const isOrdered = (item) => item.mark.length > 1;
const isSibling = (first, item) => item !== null && item.mark.at(-1) === first.mark.at(-1);

/** Whether `line` begins a block within a paragraph. */
function interrupts(line) {
  if (isBlank(line) || openedFence(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = itemOf(line);
  return item !== null && item.text.trim() !== "" && (!isOrdered(item) || parseInt(item.mark, 10) === 1);
}

/** Whether a paragraph may be open at the end of `line`, so that an unmarked line continues it. */
function isProse(line) {
  let text = line;
  for (let depth = 0; depth < MAX_DEPTH; depth++) text = itemOf(text)?.text ?? text.replace(QUOTE, "");
  return !interrupts(text) && indentOf(text) < 4;
}

class BlockReader {
  /** @param {string} text */
  constructor(text) {
    this.lines = text.split(/\r?\n/);
    this.at = 0;
    /** @type {Block[]} */
    this.blocks = [];
    this.hasGap = false; // a blank line between two blocks
    this.textAfter = []; // for each line, the next one that is not blank
    for (let at = this.lines.length - 1, next = this.lines.length; at >= 0; at--) {
      if (!isBlank(this.lines[at])) next = at;
      this.textAfter[at] = next;
    }
  }

  read() {
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      if (isBlank(line)) {
        this.at = this.textAfter[this.at];
        this.hasGap ||= this.blocks.length > 0 && this.at < this.lines.length;
      } else {
        this.readBlock(line);
      }
    }
    return this;
  }

  readBlock(line) {
    const fence = openedFence(line);
    const heading = HEADING.exec(line);
    const item = itemOf(line);
    if (fence) this.readFence(fence, indentOf(line));
    else if (heading) this.add("heading", line.slice(heading[0].length).trim().replace(/(?:^|[ \t])#+$/, "").trim(), heading[1].length);
    else if (RULE.test(line)) this.add("rule", "");
    else if (QUOTE.test(line)) this.readQuote();
    else if (item) this.readList(item);
    else if (indentOf(line) >= 4) this.readIndentedCode();
    else if (NOTE.test(line)) this.readNote(NOTE.exec(line));
    else if (opensTable(this.lines, this.at)) this.readTable();
    else if (DEFINITION.test(line)) this.add("definition", line, normalLabel(DEFINITION.exec(line)[1]));
    else this.readParagraph();
  }

  /**
   * Add a block and step over its last lines.
   * @param {string} kind
   * @param {string} source
   * @param {string | number} info
   */
  add(kind, source, info = "", lines = 1) {
    this.blocks.push({ kind, source, info });
    this.at += lines;
  }

  /** Take lines while `test(line, at)` holds, from the line `skip` lines ahead. */
  take(test, skip = 0) {
    const begin = (this.at += skip);
    while (this.at < this.lines.length && test(this.lines[this.at], this.at)) this.at++;
    return this.lines.slice(begin, this.at);
  }

  readFence(fence, indent) {
    const code = this.take((line) => !closes(fence, line), 1);
    this.add("code", code.map((line) => dedent(line, indent)).join("\n"), fence.language);
  }

  readIndentedCode() {
    const code = this.take((line, at) => indentOf(this.lines[this.textAfter[at]] ?? "") >= 4);
    this.add("code", code.map((line) => dedent(line, 4)).join("\n"), "", 0);
  }

  /** Whether an unmarked line continues the paragraph at the end of the container's previous line. */
  goesOn(line, at) {
    return !interrupts(line) && !itemOf(line) && isProse(this.lines[at - 1]) && !opensTable(this.lines, at);
  }

  readQuote() {
    let fence = null;
    const lines = this.take((line, at) => {
      if (!QUOTE.test(line)) return !fence && this.goesOn(line, at);
      const inner = line.replace(QUOTE, "");
      if (!fence) fence = openedFence(inner);
      else if (closes(fence, inner)) fence = null;
      return true;
    });
    this.add("quote", lines.map((line) => line.replace(QUOTE, "")).join("\n"), "", 0);
  }

  /** The contents of an item need an indentation of two columns only, because models seldom write three after `1.`. */
  readList(first) {
    const within = (line) => indentOf(line) >= first.indent + 2 || isSibling(first, itemOf(line));
    const lines = this.take((line, at) => {
      if (isBlank(line)) return this.textAfter[at] < this.lines.length && within(this.lines[this.textAfter[at]]);
      return within(line) || this.goesOn(line, at);
    });
    this.add("list", lines.join("\n"), isOrdered(first) ? parseInt(first.mark, 10) : "", 0);
  }

  readNote(found) {
    const belongs = (line, at) => {
      const text = isBlank(line) ? this.lines[this.textAfter[at]] : line;
      return text !== undefined && (indentOf(text) >= 2 || (!isBlank(line) && !NOTE.test(line) && this.goesOn(line, at)));
    };
    const first = this.lines[this.at].slice(found[0].length);
    const more = this.take(belongs, 1).map((line) => dedent(line, 4));
    this.add("note", [first, ...more].join("\n"), normalLabel(found[1]), 0);
  }

  readTable() {
    const [header, delimiters] = this.lines.slice(this.at, this.at + 2);
    this.add("table", [header, delimiters, ...this.take((line) => !interrupts(line), 2)].join("\n"), "", 0);
  }

  readParagraph() {
    let count = 0;
    const lines = this.take((line, at) => {
      const level = count > 0 && UNDERLINE.test(line);
      return count++ === 0 || (!level && !interrupts(line) && !opensTable(this.lines, at));
    });
    // White space at the end of a line may be a hard break; at the beginning it has no meaning.
    const source = lines.map((line) => line.replace(/^[ \t]+/, "")).join("\n").trimEnd();
    const line = this.lines[this.at] ?? "";
    if (UNDERLINE.test(line)) this.add("heading", source, line.includes("=") ? 1 : 2);
    else this.add("paragraph", source, "", 0);
  }
}
