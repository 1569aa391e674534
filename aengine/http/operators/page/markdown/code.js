// Coloured code: comments, strings, numbers and keywords are in spans. Everything else stays plain text.

const MAX_COLOURED = 50_000; // characters; drawing more would take longer than a frame
const NUMBER = String.raw`(?<![\w.])(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-zA-Z]{0,3}\b`;
const readers = new Map();

/** @returns {{pattern: RegExp, keywords: Set<string>, foldsCase: boolean, isMarkup: boolean} | null} null for an unknown language */
function codeReader(language) {
  const written = language.toLowerCase().split(/[\s{,:]/, 1)[0];
  const name = Object.hasOwn(LANGUAGE_NAMES, written) ? LANGUAGE_NAMES[written] : written;
  if (!Object.hasOwn(LANGUAGES, name)) return null;
  if (!readers.has(name)) {
    const { comments, strings, keywords, word = "[A-Za-z_$][\\w$]*", foldsCase = false } = LANGUAGES[name];
    const kinds = [["comment", comments], ["string", strings], ["number", [NUMBER]], ["word", [word]]];
    const pattern = new RegExp(kinds.map(([kind, sources]) => `(?<${kind}>${sources.join("|")})`).join("|"), "g");
    readers.set(name, { pattern, keywords: new Set(keywords.split(" ")), foldsCase, isMarkup: name === "html" });
  }
  return readers.get(name);
}

/** `[class, text]` of each piece; the class is empty for plain text. */
function piecesOfCode(source, language) {
  const reader = source.length > MAX_COLOURED ? null : codeReader(language);
  if (!reader) return /^diff|^patch/.test(language) ? piecesOfDiff(source) : [["", source]];
  const pieces = [];
  let at = 0;
  for (const found of source.matchAll(reader.pattern)) {
    const [text] = found;
    const { comment, string, number, word } = found.groups;
    const isKeyword = word !== undefined && (reader.isMarkup || reader.keywords.has(reader.foldsCase ? word.toLowerCase() : word));
    const kind = comment ? "comment" : string ? "string" : number ? "number" : isKeyword ? "keyword" : "";
    if (!kind) continue;
    if (found.index > at) pieces.push(["", source.slice(at, found.index)]);
    pieces.push([kind, text]);
    at = found.index + text.length;
  }
  if (at < source.length) pieces.push(["", source.slice(at)]);
  return pieces;
}

function piecesOfDiff(source) {
  const kindOf = (line) => ({ "+": "added", "-": "removed", "@": "keyword" })[line[0]] ?? "";
  return source.length > MAX_COLOURED ? [["", source]] : (source.match(/[^\n]*\n|[^\n]+/g) ?? []).map((line) => [kindOf(line), line]);
}

const paintedPieces = new WeakMap();

/** Show `source` in `node`. Unchanged pieces at the beginning keep their nodes. */
function paintCode(node, source, language) {
  const old = paintedPieces.get(node) ?? [];
  const pieces = piecesOfCode(source, language);
  let same = 0;
  while (same < old.length && same < pieces.length && old[same][0] === pieces[same][0] && old[same][1] === pieces[same][1]) same++;
  while (node.childNodes.length > same) node.lastChild.remove();
  for (const [className, text] of pieces.slice(same)) node.append(className ? make("span", { className }, text) : text);
  paintedPieces.set(node, pieces);
}
