// The request's settings other than messages. An empty field leaves the choice to the server.

const settings = byId("settings");
const NUMBERS = [
  ...["temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed"],
  ...["presence_penalty", "frequency_penalty", "repetition_penalty"],
];
const LINES = ["stop", "bad_words"]; // lists: one value in each line
const OBJECTS = ["logit_bias", "schema", "more"]; // JSON

function openPanel(open) {
  byId("panel").classList.toggle("open", open);
  byId("show-panel").setAttribute("aria-expanded", open);
}

const valueOf = (name) => settings.elements[name].value;
const systemPrompt = () => valueOf("system").trim();

/** The request's fields. */
function requestFields() {
  const fields = {};
  for (const name of NUMBERS) if (valueOf(name) !== "") fields[name] = Number(valueOf(name));
  for (const name of LINES) if (valueOf(name)) fields[name] = valueOf(name).split("\n").filter(Boolean);
  if (valueOf("logit_bias").trim()) fields.logit_bias = JSON.parse(valueOf("logit_bias"));
  if (settings.elements.ignore_eos.checked) fields.ignore_eos = true;
  if (valueOf("thinking")) fields.chat_template_kwargs = { enable_thinking: valueOf("thinking") === "on" };
  if (valueOf("reasoning_effort")) fields.reasoning_effort = valueOf("reasoning_effort");
  if (valueOf("format") === "json_object") fields.response_format = { type: "json_object" };
  if (valueOf("format") === "json_schema") {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(valueOf("schema")) } };
  }
  return { ...fields, ...(valueOf("more").trim() ? JSON.parse(valueOf("more")) : {}) };
}

/** Mark the JSON fields as valid or not. */
function checkObjects() {
  const isSchema = valueOf("format") === "json_schema";
  byId("schema-field").hidden = !isSchema;
  settings.elements.schema.required = isSchema;
  for (const name of OBJECTS) {
    const field = settings.elements[name];
    const isUsed = field.value.trim() && (name !== "schema" || isSchema);
    field.setCustomValidity(isUsed && !isObject(field.value) ? "This is no JSON object." : "");
  }
}

function isObject(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

/** Whether every field is valid; shows the first invalid one. */
function settingsAreValid() {
  checkObjects();
  if (settings.checkValidity()) return true;
  openPanel(true);
  settings.querySelector(":invalid").closest("details")?.setAttribute("open", "");
  settings.reportValidity();
  return false;
}

/** Use the system prompt and the model of an opened conversation. */
function useSettingsOf({ system, model }) {
  settings.elements.system.value = system;
  chooseModel(model);
}

function useKept(kept) {
  for (const [name, value] of Object.entries(kept)) {
    const field = settings.elements[name];
    if (field?.type === "checkbox") field.checked = value === "on";
    else if (field) field.value = value;
  }
  checkObjects();
}

const keepSettings = () => {
  checkObjects();
  remember.set("settings", Object.fromEntries(new FormData(settings)));
};
settings.addEventListener("input", keepSettings);
settings.addEventListener("reset", () => setTimeout(keepSettings)); // the fields are emptied after the event
settings.addEventListener("submit", (event) => event.preventDefault());
byId("show-panel").addEventListener("click", () => {
  openPanel(!byId("panel").classList.contains("open"));
  openList(false);
});
useKept(remember.get("settings") ?? {});
