// Elements are made here, with text as text: nothing in this page is ever parsed as HTML.

const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// What survives a reload: in this tab, until it is closed; where the browser keeps nothing, not even that.
const keep = {
  get(name) {
    try {
      return JSON.parse(sessionStorage.getItem(`aengine.${name}`));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(`aengine.${name}`, JSON.stringify(value));
    } catch {
      // Full or forbidden: the page goes on from memory.
    }
  },
};

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
