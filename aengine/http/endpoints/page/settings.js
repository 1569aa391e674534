// What is asked of the model besides the question. An empty field leaves the choice to the server.

const settings = byId("settings");
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

function openPanel(open) {
  byId("panel").classList.toggle("open", open);
  byId("show-panel").setAttribute("aria-expanded", open);
}

function systemPrompt() {
  return settings.elements.system.value.trim();
}

/** The request's fields. */
function samplingFields() {
  const fields = {};
  for (const name of NUMBERS) {
    const { value } = settings.elements[name];
    if (value !== "") fields[name] = Number(value);
  }
  const thinking = settings.elements.thinking.value;
  if (thinking) fields.chat_template_kwargs = { enable_thinking: thinking === "on" };
  return fields;
}

/** Whether every field holds what it can hold; shows the first that does not. */
function settingsAreValid() {
  if (settings.checkValidity()) return true;
  openPanel(true);
  settings.reportValidity();
  return false;
}

for (const [name, value] of Object.entries(keep.get("settings") ?? {})) {
  if (settings.elements[name]) settings.elements[name].value = value;
}
const keepSettings = () => keep.set("settings", Object.fromEntries(new FormData(settings)));
settings.addEventListener("input", keepSettings);
settings.addEventListener("reset", () => setTimeout(keepSettings)); // the fields are emptied after the event
settings.addEventListener("submit", (event) => event.preventDefault());
byId("show-panel").addEventListener("click", () => openPanel(!byId("panel").classList.contains("open")));
