// Blocks to nodes. Text becomes text nodes, so that nothing in it is ever HTML.

/**
 * @param {Block} block
 * @param {MarkdownDocument} markdown
 * @param {number} depth the number of enclosing blocks
 */
function renderBlock(block, markdown, depth = 0) {
  const { kind, source, info } = block;
  if (depth > MAX_DEPTH) return make("p", {}, source);
  switch (kind) {
    case "code":
      return renderCode(source, info);
    case "heading":
      return fill(make(`h${Math.min(6, info + 2)}`), inline(source, markdown));
    case "rule":
      return make("hr");
    case "quote":
      return fill(make("blockquote"), renderBlocks(source, markdown, depth));
    case "list":
      return renderList(block, markdown, depth);
    case "table":
      return renderTable(source, markdown);
    case "note": // a footnote without references
      return fill(make("div"), renderBlocks(`&#91;^${info}]: ${source}`, markdown, depth));
    default:
      return fill(make("p"), inline(source, markdown));
  }
}

const renderBlocks = (source, markdown, depth) => {
  return new BlockReader(source).read().blocks.map((block) => renderBlock(block, markdown, depth + 1));
};

/** Code with its language and a button that copies it. */
function renderCode(source, language) {
  const code = make("code");
  paintCode(code, source, language);
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => copyText(code.textContent, button, code));
  return make("div", { className: "code" }, make("div", {}, make("span", {}, language), button), make("pre", {}, code));
}

/** A list. Its items are paragraphs if there is a blank line between two items or within one. */
function renderList({ source, info }, markdown, depth) {
  const first = itemOf(source.split("\n", 1)[0]);
  const items = itemsOf(source, first).map((lines) => new BlockReader(lines.join("\n")).read());
  const isLoose = items.some(({ hasGap, lines }, index) => hasGap || (index < items.length - 1 && isBlank(lines.at(-1)) && lines.length > 1));
  const list = make(isOrdered(first) ? "ol" : "ul");
  if (isOrdered(first) && info !== 1) list.start = info;
  for (const { blocks } of items) {
    const item = make("li");
    const task = blocks[0]?.kind === "paragraph" ? /^\[([ xX])\]\s+(?=\S)/.exec(blocks[0].source) : null;
    if (task) {
      blocks[0].source = blocks[0].source.slice(task[0].length);
      item.className = "task";
      item.append(taskBox(task[1] !== " "));
    }
    for (const block of blocks) {
      if (block.kind === "paragraph" && !isLoose) fill(item, inline(block.source, markdown));
      else item.append(renderBlock(block, markdown, depth + 1));
    }
    list.append(item);
  }
  return list;
}

const taskBox = (isDone) => make("span", { className: "box", role: "img", ariaLabel: isDone ? "done" : "to do" }, isDone ? "☑" : "☐");

/** The lines of each item, without marks and indentation. */
function itemsOf(source, first) {
  const items = [];
  let width = 0;
  for (const line of source.split("\n")) {
    const item = indentOf(line) < first.indent + 2 ? itemOf(line) : null;
    if (isSibling(first, item)) {
      width = item.width;
      items.push([item.text]);
    } else {
      items.at(-1).push(dedent(line, width));
    }
  }
  return items;
}

/** The mark of a footnote, a link to its text. */
function noteMark(label, markdown) {
  const number = markdown.numbers.get(label);
  const button = make("button", { type: "button", className: "note", ariaLabel: `Footnote ${number}` }, String(number));
  button.addEventListener("click", () => showNote(button.closest(".prose").querySelectorAll(".notes > ol > li")[number - 1]));
  return make("sup", {}, button);
}

function showNote(node) {
  node.tabIndex = -1;
  node.scrollIntoView({ block: "nearest" });
  node.focus();
}

/** The texts of footnotes, each with a button back to its mark. */
function renderNotes(markdown) {
  const list = make("ol");
  markdown.notes.forEach((note, index) => {
    const back = make("button", { type: "button", className: "note", ariaLabel: `Back to reference ${index + 1}` }, "↩");
    back.addEventListener("click", () => back.closest(".prose").querySelector(`[aria-label="Footnote ${index + 1}"]`)?.focus());
    list.append(fill(make("li"), [...renderBlocks(note.source, markdown, 1), back]));
  });
  return make("section", { className: "notes", ariaLabel: "Footnotes" }, list);
}
