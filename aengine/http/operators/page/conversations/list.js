// The list of conversations: open, search, rename, delete and undo, import and export.

const UNDO_MILLISECONDS = 12_000;
const SEARCH_MILLISECONDS = 150; // after the last key
let chosen = null; // the record whose menu is open
let shownTitles = "";
let undo = null; // restores the conversations that were deleted last

function openList(open) {
  byId("conversations").classList.toggle("open", open);
  byId("show-list").setAttribute("aria-expanded", open);
  if (open) openPanel(false);
}

async function showList() {
  const wanted = byId("search").value.trim();
  const [records, found] = await Promise.all([store.list(), wanted ? store.search(wanted) : null]);
  if (wanted !== byId("search").value.trim()) return; // the text has changed since; another search follows
  const shown = found ? records.filter(({ id }) => found.has(id)) : records;
  showTitles(shown.map((record) => ({ record, excerpt: found?.get(record.id) ?? "" })));
  byId("no-titles").textContent = wanted ? "Nothing found." : "Conversations are kept in this browser.";
  byId("no-titles").hidden = shown.length > 0;
  for (const id of ["export-all", "delete-all"]) byId(id).disabled = !records.length;
  showCurrent();
}

/** Draw the list again if it has changed. The focused conversation keeps the focus. */
function showTitles(titles) {
  const now = JSON.stringify(titles.map(({ record, excerpt }) => [record.id, record.title, excerpt]));
  if (now === shownTitles) return;
  shownTitles = now;
  const focused = document.activeElement?.closest("#titles li")?.dataset.id;
  byId("titles").replaceChildren(...titles.map(({ record, excerpt }) => listItem(record, excerpt)));
  if (focused) byId("titles").querySelector(`[data-id="${CSS.escape(focused)}"] .title`)?.focus();
}

function listItem(record, excerpt) {
  const title = button("", async () => {
    const opened = await store.load(record.id);
    if (opened) openConversation(opened);
  }, "title");
  title.append(make("span", {}, record.title));
  if (excerpt) title.append(make("small", {}, excerpt));
  const more = make("button", { type: "button", className: "more", ariaLabel: `Options of ${record.title}` }, "⋯");
  more.addEventListener("click", () => openMenu(record, more));
  const item = make("li", {}, title, more);
  item.dataset.id = record.id;
  return item;
}

/** Mark the open conversation. */
function showCurrent() {
  for (const item of byId("titles").children) {
    const isCurrent = item.dataset.id === conversation.id;
    if (isCurrent) item.firstChild.setAttribute("aria-current", "true");
    else item.firstChild.removeAttribute("aria-current");
  }
  document.title = conversation.record.title ? `${conversation.record.title} · aengine` : "aengine";
}

function openMenu(record, anchorNode) {
  chosen = record;
  const menu = byId("menu");
  const box = anchorNode.getBoundingClientRect();
  menu.showPopover();
  menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - menu.offsetWidth - 8))}px`;
  menu.style.top = `${Math.max(8, Math.min(box.bottom + 4, innerHeight - menu.offsetHeight - 8))}px`;
  menu.querySelector("button").focus();
}

/** Show a dialog, and return its field's value, or null. */
function askIn(dialog, field = null) {
  dialog.returnValue = "";
  dialog.showModal();
  field?.select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue ? (field?.value.trim() ?? "yes") : null), { once: true });
  });
}

async function rename(record) {
  byId("title").value = record.title;
  const title = await askIn(byId("rename-dialog"), byId("title"));
  if (!title) return;
  const renamed = record.id === conversation.id ? conversation : await store.load(record.id);
  if (!renamed) return;
  renamed.record.title = title;
  await store.save(renamed, [], ["title"]);
  showList();
}

/** Delete conversations, and offer to undo it. */
async function removeAll(removed) {
  for (const { id } of removed) await store.remove(id);
  if (removed.some(({ id }) => id === conversation.id)) openConversation(new Conversation());
  showList();
  undo?.abort();
  const taken = (undo = new AbortController());
  const name = removed.length === 1 ? `“${removed[0].record.title}”` : `${removed.length} conversations`;
  show("undo-text", `Deleted ${name}.`);
  byId("undo").hidden = false;
  const hide = () => (byId("undo").hidden = true);
  const timer = setTimeout(hide, UNDO_MILLISECONDS);
  const bringBack = async () => {
    hide();
    clearTimeout(timer);
    for (const one of removed) await store.saveAll(one);
    showList();
  };
  byId("undo-button").addEventListener("click", bringBack, { once: true, signal: taken.signal });
  taken.signal.addEventListener("abort", () => clearTimeout(timer));
}

const everything = async () => (await Promise.all((await store.list()).map(({ id }) => store.load(id)))).filter(Boolean);

const MENU = {
  rename,
  "export-json": async ({ id, title }) => download(`${title}.json`, "application/json", await toJson([await store.load(id)])),
  "export-markdown": async ({ id, title }) => download(`${title}.md`, "text/markdown", await toMarkdown(await store.load(id))),
  delete: async ({ id }) => removeAll([await store.load(id)]),
};
byId("menu").addEventListener("click", (event) => {
  const item = event.target.closest("button");
  if (!item) return;
  byId("menu").hidePopover();
  MENU[item.value](chosen);
});

async function importFiles(files) {
  const problems = [];
  let last = null;
  for (const file of files) {
    try {
      for (const one of fromFile(file.name, await file.text())) {
        await store.saveAll(one);
        last = one;
      }
    } catch (error) {
      problems.push(error.message);
    }
  }
  show("import-note", problems.join(" "));
  byId("import-note").hidden = !problems.length;
  await showList();
  if (last) openConversation(last);
}

byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async () => {
  await importFiles([...byId("import-file").files]);
  byId("import-file").value = "";
});
byId("export-all").addEventListener("click", async () => download("aengine-conversations.json", "application/json", await toJson(await everything())));
byId("delete-all").addEventListener("click", async () => {
  const all = await everything();
  show("delete-question", `Delete all ${all.length} conversations?`);
  if (await askIn(byId("delete-dialog"))) removeAll(all);
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".cancel")?.addEventListener("click", () => dialog.close(""));
}

let searchTimer = 0;
byId("search").addEventListener("input", () => {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(showList, SEARCH_MILLISECONDS);
});
byId("show-list").addEventListener("click", () => openList(!byId("conversations").classList.contains("open")));
store.addEventListener("changed", showList);
store.addEventListener("saved", showList);
store.addEventListener("trouble", ({ detail }) => {
  show("storage-note", detail);
  byId("storage-note").hidden = !detail;
});
