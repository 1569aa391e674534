// The contents of a block: code, links, references, breaks and emphasis. One pass finds the parts of a text, a second one
// (emphasis.js) makes nodes from them. Each character is read a bounded number of times.

/**
 * A part of a text from `begin` to `end`. A link's label has the parts up to the index `last`.
 * @typedef {{kind: string, begin: number, end: number, value: any, last?: number, labelBegin?: number, labelEnd?: number}} Part
 */

const SPECIAL = /\\|`+|\*+|_+|~~+|&|<|!?\[|\]|\$\$?|https?:\/\/|www\.|\n/g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const BREAK = /<br\s{0,9}\/?>/iy;
const NOTE_MARK = /\[\^([^\]\s]{1,100})\]/y;
const MATH_END = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };

class InlineReader {
  /**
   * @param {string} text
   * @param {MarkdownDocument} markdown
   */
  constructor(text, markdown) {
    this.text = text;
    this.markdown = markdown;
    this.at = 0;
    /** @type {Part[]} */
    this.parts = [];
    this.brackets = []; // indexes of parts that may begin a link
    this.found = new Map();
    this.codeEnds = null;
  }

  read() {
    for (;;) {
      SPECIAL.lastIndex = this.at;
      const special = SPECIAL.exec(this.text);
      if (!special) return this.parts;
      this.at = special.index + special[0].length;
      this.readSpecial(special[0], special.index);
    }
  }

  /** The next place of `mark`. Callers ask from left to right, so earlier results are reused. */
  find(mark, from) {
    const known = this.found.get(mark);
    if (known === undefined || (known !== -1 && known < from)) this.found.set(mark, this.text.indexOf(mark, from));
    return this.found.get(mark);
  }

  add(kind, begin, end, value) {
    this.parts.push({ kind, begin, end, value });
    this.at = end;
  }

  readSpecial(mark, begin) {
    const { text } = this;
    if (mark === "\\") this.readBackslash(begin);
    else if (mark[0] === "`") this.readCode(mark, begin);
    else if (mark[0] === "*" || mark[0] === "_" || mark[0] === "~") this.add("mark", begin, this.at, mark);
    else if (mark === "\n") this.readLineEnd(begin);
    else if (mark[0] === "$") this.readDollar(mark, begin);
    else if (mark === "[" || mark === "![") this.readBracket(mark, begin);
    else if (mark === "]") this.closeBracket(begin);
    else if (mark === "&") {
      const entity = entityAt(text, begin);
      if (entity) this.add("text", begin, entity.end, entity.sign);
    } else if (mark === "<") {
      const link = matchAt(ANGLE_LINK, text, begin);
      const href = link && safeHref(link[1]);
      if (href) this.add("bare", begin, begin + link[0].length, { href, shown: link[1] });
      else if (matchAt(BREAK, text, begin)) this.add("break", begin, BREAK.lastIndex);
    } else {
      this.readBareLink(mark, begin);
    }
  }

  readBackslash(begin) {
    const next = this.text[this.at] ?? "";
    if (next === "\n") this.add("break", begin, begin + 2);
    else if (next === "(" || next === "[") this.readMath(`\\${next}`, begin);
    else if (next === ")" || next === "]") this.at++; // the end of a formula stays as it is written
    else if (next && PUNCTUATION.test(next)) this.add("text", begin, begin + 2, next);
  }

  /** A formula, shown as source. */
  readMath(mark, begin) {
    const end = this.find(MATH_END[mark], begin + mark.length);
    if (end === -1) this.at = begin + mark.length;
    else this.add("math", begin, end + mark.length);
  }

  /** `$x$` is a formula if there is no space next to its marks and no digit after them; `$5 and $6` is not one. */
  readDollar(mark, begin) {
    if (mark === "$$") return this.readMath(mark, begin);
    const end = this.find("$", this.at);
    const line = this.find("\n", this.at);
    const fits = end > this.at && (line === -1 || end < line) && /\S/.test(this.text[this.at]) && /[^\s\\]/.test(this.text[end - 1]);
    if (fits && !/\d/.test(this.text[end + 1] ?? "")) this.add("math", begin, end + 1);
  }

  readCode(mark, begin) {
    this.codeEnds ??= placesOfRuns(this.text);
    const places = this.codeEnds.get(mark.length);
    while (places.length && places.at(-1) <= begin) places.pop();
    if (!places.length) return;
    const end = places.at(-1);
    const code = this.text.slice(this.at, end).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
    this.add("code", begin, end + mark.length, isPadded ? code.slice(1, -1) : code);
  }

  readLineEnd(end) {
    let begin = end;
    while (this.text[begin - 1] === " ") begin--;
    if (end - begin >= 2) this.add("break", begin, end + 1);
  }

  readBracket(mark, begin) {
    const note = mark === "[" && matchAt(NOTE_MARK, this.text, begin);
    const label = note ? normalLabel(note[1]) : "";
    if (label && this.markdown.numbers.has(label)) return this.add("note", begin, begin + note[0].length, label);
    this.brackets.push(this.parts.length);
    return this.add("text", begin, this.at, mark);
  }

  closeBracket(at) {
    const index = this.brackets.pop();
    if (index === undefined) return;
    const part = this.parts[index];
    const tail = linkTail(this.text, part.end, at, this.markdown.links);
    if (!tail) return;
    if (part.value === "[") this.brackets.length = 0; // no link within a link
    Object.assign(part, { kind: "link", value: tail.href, labelBegin: part.end, labelEnd: at, end: tail.end, last: this.parts.length });
    this.at = tail.end;
  }

  readBareLink(mark, begin) {
    const isWithinWord = mark === "www." && /[\p{L}\p{N}_/.@-]/u.test(this.text[begin - 1] ?? "");
    if (isWithinWord) return;
    const { shown, href, length } = bareLink(this.text, begin);
    if (href) this.add("bare", begin, begin + shown.length, { href, shown });
    else this.at = begin + length;
  }
}

/** The places of runs of backticks, by length, the last one first. */
function placesOfRuns(text) {
  const places = new Map();
  for (const run of text.matchAll(/`+/g)) {
    const { length } = run[0];
    if (!places.has(length)) places.set(length, []);
    places.get(length).push(run.index);
  }
  for (const list of places.values()) list.reverse();
  return places;
}

/**
 * The nodes and strings of a block's text.
 * @param {string} text
 * @param {MarkdownDocument} markdown
 */
function inline(text, markdown) {
  const parts = new InlineReader(text, markdown).read();
  return new InlineWriter(text, parts, markdown).write(0, parts.length, 0, text.length);
}
