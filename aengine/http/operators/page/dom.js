// Elements are made here, with text as text: nothing in this page is ever parsed as HTML.

const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  return fill(node, children);
}

/** Append `children`, however many there are. Strings in a row become one text. */
function fill(node, children) {
  let text = "";
  for (const child of children) {
    if (typeof child === "string") {
      text += child;
      continue;
    }
    if (text) node.append(text);
    text = "";
    node.append(child);
  }
  if (text) node.append(text);
  return node;
}

/** Small values by name in a storage of the browser; where it keeps nothing, nothing is kept. */
const keeper = (storage) => ({
  get(name) {
    try {
      return JSON.parse(globalThis[storage].getItem(`aengine.${name}`));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      globalThis[storage].setItem(`aengine.${name}`, JSON.stringify(value));
    } catch {
      // Full or forbidden: the page goes on from memory.
    }
  },
});
const keep = keeper("sessionStorage"); // for this tab, until it is closed
const remember = keeper("localStorage");

const show = (id, value) => (byId(id).textContent = value);
const whole = (value) => (value === undefined ? "–" : value.toLocaleString("en"));

/** Copy `text`, which `node` shows. */
async function copyText(text, button, node) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // There is no clipboard without https, away from localhost.
    getSelection().selectAllChildren(node);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
