// Conversations as files: JSON with every branch, or Markdown with the visible branch. Every field of a file is checked, and
// messages get new ids.

const FORMAT = "aengine-conversations";
const MARKDOWN_ROLE = /^## (User|Assistant|System)$/;

const urlsOf = (images) => Promise.all(images.map(dataUrlOf));

/**
 * The pieces of a JSON text, which may be longer than a string with the images of all conversations.
 * @param {Conversation[]} conversations
 * @returns {Promise<string[]>}
 */
async function toJson(conversations) {
  const withUrls = async (message) => ({ ...message, images: await urlsOf(message.images) });
  const pieces = [`{"format": "${FORMAT}", "version": 1, "conversations": [`];
  for (const { record, messages } of conversations) {
    const written = { ...record, messages: await Promise.all([...messages.values()].map(withUrls)) };
    pieces.push(pieces.length > 1 ? ",\n" : "\n", JSON.stringify(written, null, 1));
  }
  return [...pieces, "\n]}\n"];
}

/** @param {Conversation} conversation */
async function toMarkdown(conversation) {
  const escaped = (text) => text.split("\n").map((line) => (/^\\*## (User|Assistant|System)$/.test(line) ? `\\${line}` : line)).join("\n");
  const { title, system } = conversation.record;
  const parts = [`# ${title}`];
  if (system) parts.push("## System", escaped(system));
  for (const { role, content, images } of conversation.path()) {
    parts.push(role === "user" ? "## User" : "## Assistant");
    for (const url of await urlsOf(images)) parts.push(`![image](${url})`);
    parts.push(escaped(content));
  }
  return [`${parts.join("\n\n")}\n`];
}

/**
 * The conversations of a file. Throws an error that describes what is wrong with the file.
 * @returns {Conversation[]}
 */
function fromFile(name, text) {
  if (/\.(md|markdown|txt)$/i.test(name)) return [fromMarkdown(name, text)];
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error(`${name} is no JSON.`);
  }
  const list = Array.isArray(read?.conversations) ? read.conversations : Array.isArray(read) ? read : [read];
  const conversations = list.filter((one) => Array.isArray(one?.messages)).map(fromRecord);
  if (!conversations.length) throw new Error(`${name} holds no conversations.`);
  return conversations;
}

const textOr = (value, otherwise = "") => (typeof value === "string" ? value : otherwise);
const partsOf = (content) => (Array.isArray(content) ? content : []);
/** The text of a message's content, which is a text or a list of parts. */
const contentOf = (content) => partsOf(content).map((part) => textOr(part?.text)).filter(Boolean).join("\n") || textOr(content);
const imagesOf = (urls) => urls.map((url) => imageOf(textOr(url))).filter(Boolean);
const numberOr = (value, otherwise) => (Number.isFinite(value) && value >= 0 ? value : otherwise);

/** A conversation in our format, or a plain list of the API's messages. */
function fromRecord(read) {
  const conversation = new Conversation({
    title: textOr(read.title),
    system: textOr(read.system),
    created: numberOr(read.created, Date.now()),
  });
  // Messages may be in any order, each before or after its parent.
  const ids = new Map(read.messages.filter((one) => typeof one?.id === "string").map((one) => [one.id, newId()]));
  let last = null;
  for (const one of read.messages) {
    const content = contentOf(one?.content);
    if (one?.role === "system") conversation.record.system ||= content;
    if (one?.role !== "user" && one?.role !== "assistant") continue;
    const parent = "parent" in one ? (ids.get(one.parent) ?? null) : last;
    const calls = Array.isArray(one.calls) ? one.calls : [];
    const urls = [...partsOf(one.images), ...partsOf(one.content).map((part) => part?.image_url?.url)];
    const message = conversation.add(parent, one.role, content, {
      images: one.role === "user" ? imagesOf(urls) : [],
      reasoning: textOr(one.reasoning ?? one.reasoning_content),
      calls: calls.map((call) => ({ id: textOr(call?.id), name: textOr(call?.name), arguments: textOr(call?.arguments) })),
      finish: textOr(one.finish, "stop"),
      note: textOr(one.note),
      model: textOr(one.model),
      created: numberOr(one.created, Date.now()),
      ...(ids.has(one.id) ? { id: ids.get(one.id) } : {}),
    });
    last = message.id;
  }
  conversation.record.leaf = ids.get(read.leaf) ?? last;
  conversation.record.changed = numberOr(read.changed, Date.now());
  return conversation;
}

function fromMarkdown(name, text) {
  const lines = text.split(/\r?\n/);
  const title = /^# (.*)/.exec(lines[0])?.[1].trim() ?? "";
  const messages = [];
  for (const line of lines) {
    const role = MARKDOWN_ROLE.exec(line);
    if (role) messages.push({ role: role[1].toLowerCase(), lines: [] });
    else messages.at(-1)?.lines.push(line.replace(/^\\(?=\\*## (?:User|Assistant|System)$)/, ""));
  }
  if (!messages.length) throw new Error(`${name} holds no conversation: a line “## User” begins a question, “## Assistant” an answer.`);
  return fromRecord({ title, messages: messages.map(({ role, lines: own }) => ({ role, ...splitImages(own) })) });
}

/** The content and the images of a message's lines. */
function splitImages(lines) {
  const isImage = (line) => line.startsWith("![image](data:") && line.endsWith(")");
  const images = lines.filter(isImage).map((line) => line.slice("![image](".length, -1));
  return { images, content: lines.filter((line) => !isImage(line)).join("\n").replace(/^\n+|\n+$/g, "") };
}

/** Offer a text as a download. */
function download(name, type, pieces) {
  const href = URL.createObjectURL(new Blob(pieces, { type }));
  make("a", { href, download: name.replace(/[^\p{L}\p{N} ._-]+/gu, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
