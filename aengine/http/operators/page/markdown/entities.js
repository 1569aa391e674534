// HTML 4's character references: `&amp;`, `&Eacute;`, `&#8364;`.

// In the order of their code points. The key is the first code point.
const ENTITY_ROWS = {
  160: "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute micro para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest " +
    "Agrave Aacute Acirc Atilde Auml Aring AElig Ccedil Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave Uacute Ucirc Uuml Yacute THORN szlig " +
    "agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml igrave iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash ugrave uacute ucirc uuml yacute thorn yuml",
  913: "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho - Sigma Tau Upsilon Phi Chi Psi Omega",
  945: "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigmaf sigma tau upsilon phi chi psi omega",
  8592: "larr uarr rarr darr harr",
  8656: "lArr uArr rArr dArr hArr",
};
const ENTITY_SIGNS =
  "quot\" amp& apos' lt< gt> OElig Œ oelig œ Scaron Š scaron š Yuml Ÿ fnof ƒ circ ˆ tilde ˜ ensp\u2002 emsp\u2003 thinsp\u2009 ndash – mdash — lsquo ‘ rsquo ’ sbquo ‚ ldquo “ rdquo ” bdquo „ " +
  "dagger † Dagger ‡ bull • hellip … permil ‰ prime ′ Prime ″ lsaquo ‹ rsaquo › oline ‾ frasl ⁄ euro € image ℑ weierp ℘ real ℜ trade ™ alefsym ℵ crarr ↵ forall ∀ part ∂ exist ∃ empty ∅ nabla ∇ isin ∈ notin ∉ ni ∋ " +
  "prod ∏ sum ∑ minus − lowast ∗ radic √ prop ∝ infin ∞ ang ∠ and ∧ or ∨ cap ∩ cup ∪ int ∫ there4 ∴ sim ∼ cong ≅ asymp ≈ ne ≠ equiv ≡ le ≤ ge ≥ sub ⊂ sup ⊃ nsub ⊄ sube ⊆ supe ⊇ oplus ⊕ otimes ⊗ perp ⊥ sdot ⋅ " +
  "lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋ loz ◊ spades ♠ clubs ♣ hearts ♥ diams ♦ check ✓ cross ✗ star ☆";

const ENTITY = /&(?:#(\d{1,7})|#[xX]([\dA-Fa-f]{1,6})|([A-Za-z]\w{1,31}));/y;
const entities = new Map();
for (const [first, names] of Object.entries(ENTITY_ROWS)) {
  names.split(" ").forEach((name, place) => entities.set(name, String.fromCodePoint(Number(first) + place)));
}
for (const [, name, sign] of ENTITY_SIGNS.matchAll(/(\w+) ?([^\w ])/gu)) entities.set(name, sign);

/**
 * The character reference at `at` in `text`.
 * @returns {{sign: string, end: number} | null}
 */
function entityAt(text, at) {
  ENTITY.lastIndex = at;
  const found = ENTITY.exec(text);
  if (!found) return null;
  const [whole, decimal, hexadecimal, name] = found;
  const code = decimal ? parseInt(decimal, 10) : parseInt(hexadecimal ?? "0", 16);
  const isCharacter = 0 < code && code <= 0x10ffff && !(0xd800 <= code && code <= 0xdfff);
  const sign = name ? entities.get(name) : isCharacter ? String.fromCodePoint(code) : "\ufffd";
  return sign ? { sign, end: at + whole.length } : null;
}
