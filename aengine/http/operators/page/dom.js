// Makes elements with text nodes. Nothing in this page is ever parsed as HTML.

const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  return fill(node, children);
}

/** Append any number of `children`. Consecutive strings become one text node. */
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

/** Small values by name in a storage of the browser. Without storage they are not kept. */
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
      // The storage is full or forbidden: the page continues without it.
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
    // Without https there is a clipboard only on localhost.
    getSelection().selectAllChildren(node);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
