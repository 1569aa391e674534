// The field for a new message.

const question = byId("question");

function showBusy() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("send").disabled = !canSend();
  byId("turns").classList.toggle("busy", running !== null);
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  showBusy();
}

const canSend = () => !reading && Boolean(question.value.trim() || attached.length);

/** Take the message out of its field; null if it cannot be sent. */
function takeQuestion() {
  if (running || !canSend() || !settingsAreValid()) return null;
  const taken = { text: question.value.trim(), images: takeAttached() };
  question.value = "";
  fitQuestion();
  return taken;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const taken = takeQuestion();
  if (taken === null) return;
  openPanel(false);
  ask(taken);
});
question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open], :popover-open")) return;
  if (running) stopAnswer();
  else {
    openPanel(false);
    openList(false);
  }
});
byId("stop").addEventListener("click", () => {
  stopAnswer();
  question.focus();
});
