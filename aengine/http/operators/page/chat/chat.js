// The chat: the open conversation, its visible messages, and at most one answer that is being streamed.

const SAVE_MILLISECONDS = 1000; // between two saves of a streamed answer
let conversation = new Conversation();
let running = null; // the AbortController of the answer that is being streamed
/** @type {Map<string, MessageView>} */
const views = new Map();

/** @type {MessageActions} */
const messageActions = {
  isBusy: () => running !== null,
  branches: (message) => conversation.siblings(message),
  select(message, label) {
    if (running) return;
    conversation.select(message);
    store.save(conversation, [], ["leaf"]);
    showPath();
    views.get(message.id).focusBranch(label);
  },
  edit(message, text) {
    if (!settingsAreValid()) return;
    if (message.role === "user") askBelow(message.parent, text, message.images);
    else keepEdited(message, text);
  },
  again(message) {
    if (running || !settingsAreValid()) return;
    // An empty answer is reused.
    const answer = isEmpty(message) ? message : conversation.add(message.parent, "assistant", "");
    Object.assign(answer, { reasoning: "", failure: null, note: "", finish: "", model: chosenModel() });
    showPath();
    answerTo(answer);
  },
  continueAnswer(message) {
    if (running || !settingsAreValid()) return;
    // An answer without an end may be streaming in another tab, so it is not changed.
    const { parent, content, reasoning, finish } = message;
    const answer = finish ? message : conversation.add(parent, "assistant", content, { reasoning });
    Object.assign(answer, { failure: null, note: "", finish: "", model: chosenModel() });
    showPath();
    answerTo(answer);
  },
};

function keepEdited(message, text) {
  const { reasoning, model } = message;
  const edited = conversation.add(message.parent, "assistant", text, { reasoning, model, finish: "edited", note: "edited" });
  store.save(conversation, [edited], ["leaf", "changed"]);
  showPath();
}

/** Add a question below the message with the id `parent`, and request an answer. */
function askBelow(parent, text, images) {
  const question = conversation.add(parent, "user", text, { images });
  const answer = conversation.add(question.id, "assistant", "", { model: chosenModel() });
  conversation.record.system = systemPrompt();
  conversation.record.model = chosenModel();
  keep.set("conversation", conversation.id);
  store.save(conversation, [question, answer], ["leaf", "changed", "system", "model"]);
  showPath();
  scrollToEnd();
  answerTo(answer);
}

const ask = ({ text, images }) => askBelow(conversation.path().at(-1)?.id ?? null, text, images);

/** Show the messages of the visible path. Messages that stay keep their nodes. */
function showPath() {
  const path = conversation.path();
  const turns = byId("turns");
  path.forEach((message, index) => {
    if (!views.has(message.id)) views.set(message.id, new MessageView(message, messageActions));
    const view = views.get(message.id);
    if (turns.childNodes[index] !== view.node) turns.insertBefore(view.node, turns.childNodes[index] ?? null);
    if (view.node.ariaBusy !== "true") view.draw(false);
  });
  while (turns.childNodes.length > path.length) turns.lastChild.remove();
  showMeter(path);
  offerEnd();
}

async function answerTo(answer) {
  const [home, view, controller] = [conversation, views.get(answer.id), new AbortController()];
  running = controller;
  showBusy();
  view.draw(true);
  scrollToEnd();
  const saving = setInterval(() => store.save(home, [answer], ["changed"]), SAVE_MILLISECONDS);
  try {
    await receive(answer, await requestFor(home.path(), answer), controller.signal, () => view.grow());
    byId("spoken").textContent = "The answer is complete.";
  } catch (error) {
    const isStopped = controller.signal.aborted;
    answer.finish = isStopped ? "stopped" : "failed";
    answer.note = isStopped ? "stopped" : "";
    if (!isStopped) answer.failure = { message: error.message, remedy: error instanceof Refusal ? error.remedy : "Try again." };
    byId("spoken").textContent = isStopped ? "Stopped." : "";
  }
  clearInterval(saving);
  home.record.changed = Date.now();
  store.save(home, [answer], ["leaf", "changed"]);
  redraw(() => view.draw(false));
  if (running === controller) running = null;
  showBusy();
  if (home === conversation) showMeter(home.path());
}

function stopAnswer() {
  running?.abort();
}

/** Open another conversation. A running answer is stopped. */
function openConversation(other) {
  stopAnswer();
  running = null;
  conversation = other;
  views.clear();
  byId("turns").replaceChildren();
  keep.set("conversation", other.id);
  if (other.messages.size) useSettingsOf(other.record);
  showPath();
  scrollToEnd();
  openPanel(false);
  openList(false);
  showBusy();
  showCurrent();
}

byId("new-chat").addEventListener("click", () => {
  openConversation(new Conversation());
  question.focus();
});
store.addEventListener("changed", async ({ detail: { id, isGone } }) => {
  if (id !== conversation.id) return;
  if (isGone) {
    conversation.isGone = true; // this tab still shows it
    return;
  }
  const stored = await store.load(id);
  if (!stored || running || id !== conversation.id) return;
  conversation.merge(stored.messages.values());
  showPath();
});

async function reopen() {
  const id = keep.get("conversation");
  const stored = id && (await store.load(id));
  if (stored && !conversation.messages.size) openConversation(stored);
}
