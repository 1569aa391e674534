// Requests to the server: the key, errors and their remedies, server-sent events.

let apiKey = keep.get("key");
let keyQuestion = null; // while the dialog is open: a promise that tells whether a key was entered

const TIMEOUT_MILLISECONDS = 10_000; // for requests without a signal of their own
const NO_KEY = "This server asks for a key. It is kept in this tab only, until you close it.";
const BAD_KEY = "The server does not know this key. Is it complete?";

class Refusal extends Error {
  constructor(message, remedy, code = null) {
    super(message);
    this.remedy = remedy;
    this.code = code;
  }
}

/** Return the response. At status 401 it asks for the key and tries again. Addresses are relative, for proxies with a prefix. */
async function call(path, options = {}) {
  for (;;) {
    const used = apiKey;
    const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
    let response;
    try {
      response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MILLISECONDS), ...options, headers });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new Refusal("The server cannot be reached.", "Check that it is still running, then try again.");
    }
    if (response.status !== 401) return response;
    if (!(await newKey(used))) throw await refusalOf(response);
  }
}

/** Whether there is another key than `used`. Asks for one, unless one has been entered since. */
async function newKey(used) {
  if (apiKey !== used) return true;
  keyQuestion ??= askForKey(used ? BAD_KEY : NO_KEY).finally(() => (keyQuestion = null));
  return keyQuestion;
}

/** Whether the reader has entered a key. */
function askForKey(reason) {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = reason;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "key"), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = byId("key").value;
  byId("key").value = "";
  keep.set("key", apiKey);
  byId("key-dialog").close("key");
  document.dispatchEvent(new Event("aengine-key"));
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
byId("change-key").addEventListener("click", () => askForKey(NO_KEY));

async function refusalOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not this server's format: the answer may be a page of a proxy.
  }
  return refusal(error, response.status, response.headers.get("Retry-After"));
}

function refusal(error, status, retryAfter) {
  const message = error.message || `The server answered with status ${status}.`;
  return new Refusal(message, remedyFor(error.code, status, retryAfter), error.code);
}

function remedyFor(code, status, retryAfter) {
  const remedies = {
    context_length_exceeded: "Start a new chat, or set fewer max tokens.",
    queue_full: `Too many requests are waiting. Try again in ${retryAfter ?? "a few"} s.`,
    not_ready: "Wait until the model is loaded, then try again.",
    shutting_down: "Try again when the server is back.",
    invalid_api_key: "Give the key under Settings, then try again.",
  };
  if (Object.hasOwn(remedies, code ?? "")) return remedies[code];
  if (status === 413) return "Send less text or fewer images, or start a new chat.";
  if (status >= 400 && status < 500) return "Change what the message names, then try again.";
  return "Try again; the server’s log has the details.";
}

/** The parsed payloads of a stream. Throws the stream's error, and an error if the stream ends too early. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const brokeOff = () => new Refusal("The connection broke off in the middle of the answer.", "Try again.");
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : brokeOff();
    });
    if (done) throw brokeOff();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment that keeps the connection alive
      if (block === "data: [DONE]") return;
      const payload = JSON.parse(block.slice(6));
      if (payload.error) throw refusal(payload.error, 500, null);
      yield payload;
    }
  }
}
