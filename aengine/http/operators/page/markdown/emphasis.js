// Makes nodes from the parts of a text: emphasis by CommonMark's rules, and strikethrough by GFM's, with two tildes.

const MAX_EMPHASIS = 12; // nested; the browser lays out deeper nodes slowly
const MAX_LINKS = 3; // nested labels
const SPACE = /^\s?$/u;
const SIGN = /[\p{P}\p{S}]/u;
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u; // written without spaces

/** How a run of marks may be used, by the characters around it. */
function flanks(text, begin, end) {
  const last = text[begin - 1] ?? "";
  const before = /[\udc00-\udfff]/.test(last) ? text.slice(begin - 2, begin) : last;
  const after = end < text.length ? String.fromCodePoint(text.codePointAt(end)) : "";
  const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(after)];
  const [signBefore, signAfter] = [SIGN.test(before), SIGN.test(after)];
  const left = !spaceAfter && (!signAfter || spaceBefore || signBefore || UNSPACED.test(before));
  const right = !spaceBefore && (!signBefore || spaceAfter || signAfter || UNSPACED.test(after));
  if (text[begin] !== "_") return { canOpen: left, canClose: right };
  return { canOpen: left && (!right || signBefore), canClose: right && (!left || signAfter) };
}

class InlineWriter {
  /**
   * @param {string} text
   * @param {Part[]} parts
   * @param {MarkdownDocument} markdown
   */
  constructor(text, parts, markdown) {
    this.text = text;
    this.parts = parts;
    this.markdown = markdown;
    this.depths = new WeakMap();
  }

  /** The nodes from `begin` to `end`, with the parts `first` to `last`, within `links` enclosing links. */
  write(first, last, begin, end, links = 0) {
    const out = [];
    const openers = [];
    const floors = new Map(); // by kind of marks: the index below which there is no opener
    let at = begin;
    for (let index = first; index < last; index++) {
      const part = this.parts[index];
      if (part.begin > at) out.push(this.text.slice(at, part.begin));
      at = part.end;
      if (part.kind === "mark") this.writeMark(part, out, openers, floors);
      else if (part.kind === "link") {
        out.push(this.writeLink(part, index, links));
        index = part.last - 1;
      } else out.push(this.writeAtom(part, links > 0));
    }
    if (at < end) out.push(this.text.slice(at, end));
    return out;
  }

  writeAtom({ kind, begin, end, value }, linked) {
    if (kind === "code") return make("code", {}, value);
    if (kind === "break") return make("br");
    if (kind === "math") return make("span", { className: "math" }, this.text.slice(begin, end));
    if (kind === "note") return noteMark(value, this.markdown);
    if (kind === "bare") return linked ? value.shown : anchor(value.href, [value.shown]);
    return value;
  }

  /**
   * A link. Within another link (an image, for example) only its label.
   * @param {any} part
   */
  writeLink({ begin, end, value, last, labelBegin, labelEnd }, index, links) {
    if (links >= MAX_LINKS) return this.text.slice(begin, end);
    const label = this.write(index + 1, last, labelBegin, labelEnd, links + 1);
    return links ? fill(make("span"), label) : anchor(value, label.some(Boolean) ? label : [value]);
  }

  writeMark({ begin, end, value }, out, openers, floors) {
    const { canOpen, canClose } = flanks(this.text, begin, end);
    const mark = value[0];
    const whole = value.length;
    let count = mark === "~" && whole > 2 ? 0 : whole;
    while (count && canClose) {
      const key = `${mark}${canOpen}${whole % 3}`;
      const place = openerOf(mark, whole, canOpen, openers, floors.get(key) ?? 0);
      if (place === -1) {
        floors.set(key, openers.length);
        break;
      }
      const opener = openers[place];
      const used = Math.min(2, count, opener.count);
      const children = out.splice(opener.index + 1);
      const depth = 1 + children.reduce((most, child) => Math.max(most, this.depths.get(child) ?? 0), 0);
      if (depth > MAX_EMPHASIS) openers.length = 0;
      else openers.length = opener.count === used ? place : place + 1;
      for (const [floor, height] of floors) floors.set(floor, Math.min(height, openers.length));
      if (depth > MAX_EMPHASIS) {
        for (const child of children) out.push(child);
        continue;
      }
      const node = fill(make(mark === "~" ? "del" : used === 2 ? "strong" : "em"), children);
      this.depths.set(node, depth);
      opener.count -= used;
      count -= used;
      out[opener.index] = mark.repeat(opener.count);
      out.push(node);
    }
    if (mark === "~" && whole > 2) out.push(value);
    if (!count) return;
    out.push(mark.repeat(count));
    if (canOpen) openers.push({ mark, whole, count, canClose, index: out.length - 1 });
  }
}

/** The index of the nearest opener for a closer of `mark`, at least `floor`; -1 for none. */
function openerOf(mark, whole, canOpen, openers, floor) {
  for (let place = openers.length - 1; place >= floor; place--) {
    const opener = openers[place];
    const isOddMatch = (opener.canClose || canOpen) && (opener.whole + whole) % 3 === 0 && whole % 3 !== 0;
    if (opener.mark === mark && (mark === "~" || !isOddMatch)) return place;
  }
  return -1;
}
