// The request for an answer, and the streamed answer.

/** A message in the API's format. */
async function asChatMessage({ role, content, images, reasoning, calls }) {
  const message = { role, content };
  if (images.length) {
    const parts = (await Promise.all(images.map(dataUrlOf))).map((url) => ({ type: "image_url", image_url: { url } }));
    message.content = content ? [...parts, { type: "text", text: content }] : parts;
  }
  if (reasoning) message.reasoning_content = reasoning;
  if (calls.length) message.tool_calls = calls.map((one) => ({ id: one.id, type: "function", function: { name: one.name, arguments: one.arguments } }));
  return message;
}

const isEmpty = ({ role, content, calls }) => role === "assistant" && !content && !calls.length;

/**
 * The request for `answer`, the last message of `path`. If the answer has text, the request continues it.
 * A question without an answer is left out, because few chat templates allow two questions in a row.
 * @param {Message[]} path
 * @param {Message} answer
 */
async function requestFor(path, answer) {
  const before = path.slice(0, path.indexOf(answer));
  const said = before.filter((one, index) => !isEmpty(one) && !(before[index + 1] && one.role === "user" && isEmpty(before[index + 1])));
  const system = systemPrompt();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...(await Promise.all(said.map(asChatMessage)))];
  const request = { messages, stream: true, stream_options: { include_usage: true }, ...requestFields() };
  if (answer.model) request.model = answer.model;
  if (answer.content) {
    messages.push(await asChatMessage(answer));
    Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  }
  return request;
}

/** Add a piece of a stream to its message. */
function takeDelta(message, delta) {
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (message.calls[index] ??= { id, name: "", arguments: "" });
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

/**
 * Stream the answer into its message. `grown` is called for each piece.
 * @param {Message} answer
 * @param {object} request
 * @param {AbortSignal} signal
 * @param {() => void} grown
 */
async function receive(answer, request, signal, grown) {
  const begin = performance.now();
  let first = 0;
  let usage = null;
  const headers = { "Content-Type": "application/json" };
  const response = await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(request), signal });
  if (!response.ok) throw await refusalOf(response);
  for await (const event of eventsOf(response)) {
    const choice = event.choices?.[0];
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (content || reasoning || calls) {
      first ||= performance.now();
      takeDelta(answer, choice.delta);
      grown();
    }
    answer.finish = choice?.finish_reason ?? answer.finish;
    usage = event.usage ?? usage;
  }
  answer.note = describe(usage, answer.finish, first - begin, performance.now() - first);
  if (usage) answer.tokens = { prompt: usage.prompt_tokens, completion: usage.completion_tokens };
}

function describe(usage, finish, wait, flow) {
  const parts = finish === "length" ? ["cut off at the token limit"] : [];
  if (usage) {
    const { completion_tokens: tokens, prompt_tokens: prompt } = usage;
    parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    // Tokens that arrive in one burst have no rate.
    if (tokens > 1 && flow > 50) parts.push(`${figure((1000 * (tokens - 1)) / flow)} tok/s`);
    if (tokens > 0) parts.push(`first after ${Math.round(wait)} ms`);
    parts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${prompt} prompt tokens cached`);
  }
  return parts.join(" · ");
}

const figure = (value) => (0 < value && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
