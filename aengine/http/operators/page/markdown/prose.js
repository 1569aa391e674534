// A growing Markdown text. Unchanged blocks keep their nodes, so that selections and scroll positions survive.

class Prose {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.blocks = [];
    this.signature = "";
  }

  /** @param {string} text */
  show(text) {
    const markdown = readDocument(text);
    const { blocks, notes, signature } = markdown;
    this.notes?.remove();
    let same = 0;
    if (signature === this.signature) {
      while (same < blocks.length && isSameBlock(blocks[same], this.blocks[same])) same++;
      const [old, now] = [this.blocks[same], blocks[same]];
      if (old?.kind === "code" && now?.kind === "code" && old.info === now.info) {
        paintCode(this.root.childNodes[same].querySelector("code"), now.source, now.info);
        same++;
      }
    }
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    for (const block of blocks.slice(same)) this.root.append(renderBlock(block, markdown));
    this.notes = notes.length ? renderNotes(markdown) : null;
    if (this.notes) this.root.append(this.notes);
    this.blocks = blocks;
    this.signature = signature;
  }
}

const isSameBlock = (a, b) => b !== undefined && a.kind === b.kind && a.source === b.source && a.info === b.info;
