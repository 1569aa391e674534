// A whole Markdown text: its blocks, and the links and footnotes that blocks refer to by label.

/**
 * `links`: addresses by label. `numbers`: numbers of footnotes by label, in the order of their first references.
 * `signature` changes if the same block would be rendered differently.
 * @typedef {{blocks: Block[], notes: Block[], links: Map<string, string>, numbers: Map<string, number>, signature: string}} MarkdownDocument
 */

const REFERENCE = /\[(\^?)([^[\]]{1,500})\](?!:)/g;

/**
 * @param {string} text
 * @returns {MarkdownDocument}
 */
function readDocument(text) {
  const { blocks } = new BlockReader(text).read();
  const defined = new Map(blocks.filter((block) => block.kind === "note").reverse().map((block) => [block.info, block]));
  const addresses = new Map();
  for (const { kind, info, source } of blocks) {
    const href = kind === "definition" && safeHref(DEFINITION.exec(source)[2]);
    if (href && !addresses.has(info)) addresses.set(info, href);
  }
  const links = new Map();
  const numbers = new Map();
  if (defined.size || addresses.size) {
    for (const [, caret, written] of text.matchAll(REFERENCE)) {
      const label = normalLabel(written);
      if (caret && defined.has(label) && !numbers.has(label)) numbers.set(label, numbers.size + 1);
      else if (!caret && addresses.has(label)) links.set(label, addresses.get(label));
    }
  }
  // A definition without references is shown, so that no part of an answer is hidden.
  const isShown = ({ kind, info }) => !(kind === "definition" && links.has(info)) && !(kind === "note" && numbers.has(info));
  return {
    blocks: blocks.filter(isShown),
    notes: [...numbers.keys()].map((label) => defined.get(label)),
    links,
    numbers,
    signature: JSON.stringify([...links, ...numbers]),
  };
}
