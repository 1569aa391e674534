// The field for a new message. Further parts of a message, such as attachments, would be collected in `takeQuestion`.

const question = byId("question");

function showBusy() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("send").disabled = !question.value.trim();
  byId("turns").classList.toggle("busy", running !== null);
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  showBusy();
}

/** Take the message out of its field; null if it cannot be sent. */
function takeQuestion() {
  const text = question.value.trim();
  if (running || !text || !settingsAreValid()) return null;
  question.value = "";
  fitQuestion();
  return text;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = takeQuestion();
  if (text === null) return;
  openPanel(false);
  ask(text);
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
