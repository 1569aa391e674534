// The choice of models: the served one, by each of its names, and its adapters.

let models = []; // as /v1/models lists them
const modelSelect = byId("model-select");

async function showModels() {
  const response = await call("v1/models");
  if (!response.ok) throw await refusalOf(response);
  models = (await response.json()).data;
  const wanted = chosenModel() || conversation.record.model;
  modelSelect.replaceChildren(...models.map(({ id, parent }) => make("option", { value: id }, parent ? `${id} (adapter)` : id)));
  chooseModel(wanted);
}

/** Choose a model by name, or the first one if it is not served. */
function chooseModel(name) {
  if (!models.length) return;
  modelSelect.value = models.some(({ id }) => id === name) ? name : models[0].id;
  modelSelect.hidden = models.length < 2;
  const { id, max_model_len: limit } = models[modelSelect.selectedIndex];
  show("model-name", id);
  show("model-context", ` · ${whole(limit)} tokens of context`);
  showMeter(conversation.path());
  offerImages();
}

/** The model's name for a request; empty until it is known. */
const chosenModel = () => modelSelect.value;
const takesImages = () => models[modelSelect.selectedIndex]?.takes_images ?? false;
const chosenLimit = () => models[modelSelect.selectedIndex]?.max_model_len;

modelSelect.addEventListener("change", () => chooseModel(modelSelect.value));
