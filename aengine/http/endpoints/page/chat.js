// The chat: turns of a question and its answer, one of them at most being answered.

const question = byId("question");
let turns = [];
let running = null; // the AbortController of the answer that is on its way


class Turn {
  constructor(asked, answer = {}) {
    this.asked = asked;
    this.answer = { content: "", reasoning: "", calls: [], note: "", message: "", remedy: "", ...answer };
    this.frame = 0;
    this.summary = make("summary", {}, "Thought");
    this.thoughts = make("p");
    this.thought = make("details", { className: "thought", hidden: true }, this.summary, this.thoughts);
    this.prose = make("div", { className: "prose" });
    this.calls = make("div", { className: "prose" });
    this.failure = make("div", { className: "failure", role: "alert", hidden: true }, make("p"), make("p"));
    this.note = make("span", { className: "quiet figure" });
    this.again = make("button", { type: "button", className: "again" }, "Again");
    this.copy = make("button", { type: "button" }, "Copy");
    this.waiting = make("div", { className: "dot", hidden: true });
    this.body = make("div", { className: "answer" }, this.waiting, this.thought, this.prose, this.calls, this.failure);
    this.foot = make("div", { className: "foot" }, this.again, this.copy, this.note);
    this.node = make("article", { className: "turn" }, make("div", { className: "asked" }, make("p", {}, asked)), this.body, this.foot);
    this.text = new Prose(this.prose);
    this.again.addEventListener("click", () => !running && settingsAreValid() && answerTo(this));
    this.copy.addEventListener("click", () => copyText(this.answer.content, this.copy, this.prose));
    this.draw(false);
  }

  /** Without an answer the next request leaves the turn out: two questions in a row suit few chat templates. */
  get messages() {
    const { content, reasoning, calls } = this.answer;
    if (!content && !calls.length) return [];
    const answer = { role: "assistant", content };
    if (reasoning) answer.reasoning_content = reasoning;
    if (calls.length) answer.tool_calls = calls.map((one) => ({ id: one.id, type: "function", function: { name: one.name, arguments: one.arguments } }));
    return [{ role: "user", content: this.asked }, answer];
  }

  begin() {
    this.answer = { content: "", reasoning: "", calls: [], note: "", message: "", remedy: "" };
    this.draw(true);
  }

  take(delta) {
    this.answer.content += delta.content ?? "";
    this.answer.reasoning += delta.reasoning_content ?? "";
    for (const { index, id, function: called } of delta.tool_calls ?? []) {
      const call = (this.answer.calls[index] ??= { id, name: "", arguments: "" });
      call.name += called?.name ?? "";
      call.arguments += called?.arguments ?? "";
    }
    this.frame ||= requestAnimationFrame(() => redraw(() => this.draw(true)));
  }

  end(note, failure = null) {
    this.answer.note = note;
    this.answer.message = failure?.message ?? "";
    this.answer.remedy = failure?.remedy ?? "";
    redraw(() => this.draw(false));
  }

  draw(busy) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { content, reasoning, calls, note, message, remedy } = this.answer;
    this.node.ariaBusy = busy;
    this.waiting.hidden = !busy || Boolean(content || reasoning || calls.length);
    this.thought.hidden = !reasoning;
    this.thoughts.textContent = reasoning;
    this.summary.textContent = busy && !content ? "Thinking…" : "Thought";
    this.text.show(content);
    this.calls.replaceChildren(...calls.filter(Boolean).map((one) => renderCode(indented(one.arguments), one.name)));
    this.failure.hidden = !message;
    this.failure.firstChild.textContent = message;
    this.failure.lastChild.textContent = remedy;
    this.note.textContent = note;
    this.again.hidden = busy;
    this.copy.hidden = busy || !content;
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not whole yet
  }
}

function requestFor(turn) {
  const system = systemPrompt();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const one of turns.slice(0, turns.indexOf(turn))) messages.push(...one.messages);
  messages.push({ role: "user", content: turn.asked });
  return { messages, stream: true, stream_options: { include_usage: true }, ...samplingFields() };
}

async function answerTo(turn) {
  const controller = (running = new AbortController());
  showBusy();
  turn.begin();
  scrollToEnd();
  try {
    turn.end(await receive(turn, controller.signal));
    byId("spoken").textContent = "The answer is complete.";
  } catch (error) {
    if (controller.signal.aborted) turn.end("stopped");
    else turn.end("", error instanceof Refusal ? error : new Refusal(String(error), "Try again."));
    byId("spoken").textContent = controller.signal.aborted ? "Stopped." : "";
  }
  if (running === controller) running = null;
  showBusy();
  keepTurns();
}

/** Stream the answer into its turn; what there is to say about it in the end. */
async function receive(turn, signal) {
  const begin = performance.now();
  let first = 0;
  let finish = "";
  let usage = null;
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(requestFor(turn)),
    signal,
  });
  if (!response.ok) throw await refusalOf(response);
  for await (const event of eventsOf(response)) {
    const choice = event.choices?.[0];
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (content || reasoning || calls) {
      first ||= performance.now();
      turn.take(choice.delta);
    }
    finish = choice?.finish_reason ?? finish;
    usage = event.usage ?? usage;
  }
  return describe(usage, finish, first - begin, performance.now() - first);
}

function describe(usage, finish, wait, flow) {
  const parts = finish === "length" ? ["cut off at its most tokens"] : [];
  if (usage) {
    const { completion_tokens: tokens, prompt_tokens: prompt } = usage;
    parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    // What comes in one burst has no rate.
    if (tokens > 1 && flow > 50) parts.push(`${figure((1000 * (tokens - 1)) / flow)} tok/s`);
    if (tokens > 0) parts.push(`first after ${Math.round(wait)} ms`);
    parts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${prompt} prompt tokens cached`);
  }
  return parts.join(" · ");
}

const figure = (value) => (0 < value && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

function keepTurns() {
  keep.set("turns", turns.map(({ asked, answer }) => ({ asked, answer })));
}

function showBusy() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("send").disabled = !question.value.trim();
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  showBusy();
}

function add(turn) {
  turns.push(turn);
  byId("turns").append(turn.node);
  return turn;
}

const stopAnswer = () => running?.abort();

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const asked = question.value.trim();
  if (running || !asked || !settingsAreValid()) return;
  question.value = "";
  fitQuestion();
  openPanel(false);
  answerTo(add(new Turn(asked)));
});
question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  if (running) stopAnswer();
  else openPanel(false);
});
byId("stop").addEventListener("click", () => {
  stopAnswer();
  question.focus();
});
byId("new-chat").addEventListener("click", () => {
  stopAnswer();
  running = null;
  turns = [];
  byId("turns").replaceChildren();
  keepTurns();
  openPanel(false);
  showBusy();
  offerEnd();
  question.focus();
});
for (const { asked, answer } of keep.get("turns") ?? []) add(new Turn(asked, answer));
scrollToEnd();
fitQuestion();
