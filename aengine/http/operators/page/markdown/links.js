// Links: how they are written, and which addresses are allowed.

const BARE_LINK = /(?:https?:\/\/|www\.)[^\s<>"`]*/y;
const ANGLE_LINK = /<(https?:\/\/[^\s<>]*)>/y;
const DESTINATION = /\([ \t\n]{0,100}(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:[ \t\n]{1,100}(?:"[^"]*"|'[^']*'))?[ \t\n]{0,100}\)/y;
const LABEL = /\[([^[\]]{0,500})\]/y;

const matchAt = (pattern, text, at) => {
  pattern.lastIndex = at;
  return pattern.exec(text);
};

/** Labels are compared without case and white space. */
const normalLabel = (label) => label.trim().replace(/\s+/g, " ").toLowerCase();

/** The address if it is a complete web address; null for javascript:, data:, and everything else. */
function safeHref(written) {
  try {
    const url = new URL(written);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

/**
 * The link that the `]` at `at` closes: with its address in parentheses, or by its label.
 * @param {Map<string, string>} definitions addresses by label
 * @returns {{href: string, end: number} | null}
 */
function linkTail(text, begin, at, definitions) {
  const inline = matchAt(DESTINATION, text, at + 1);
  if (inline) {
    const href = safeHref(inline[1] ?? inline[2]);
    return href && { href, end: at + 1 + inline[0].length };
  }
  if (!definitions.size) return null;
  const full = matchAt(LABEL, text, at + 1);
  const label = full?.[1] || (at - begin <= 500 ? text.slice(begin, at) : "");
  const href = definitions.get(normalLabel(label));
  return href ? { href, end: at + 1 + (full ? full[0].length : 0) } : null;
}

/** The bare address at `at`, without the punctuation that ends its sentence. */
function bareLink(text, at) {
  const found = matchAt(BARE_LINK, text, at)[0];
  let end = found.length;
  while (end > 0 && (".,;:!?*_~'\"]".includes(found[end - 1]) || (found[end - 1] === ")" && !found.includes("(")))) end--;
  const shown = found.slice(0, end);
  const href = safeHref(shown.startsWith("www.") ? `http://${shown}` : shown);
  return { shown, href, length: found.length };
}

function anchor(href, children) {
  const properties = { href, title: href, target: "_blank", rel: "noopener noreferrer", referrerPolicy: "no-referrer" };
  return fill(make("a", properties), children);
}
