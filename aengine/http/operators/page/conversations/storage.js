// Stores conversations in this browser's IndexedDB, with a record for each conversation and for each message. So two tabs can
// add messages to one conversation. Data that cannot be written stays in memory.

const DATABASE = "aengine";
const NO_STORAGE = "This browser keeps no conversations here. They work, and are lost when this tab closes: export what you need.";
const FULL_STORAGE = "The browser’s storage is full. New messages are lost when this tab closes: delete conversations, or export what you need.";
const FULL_OF_IMAGES = "The browser’s storage is full. New messages are kept without their images, which are lost when this tab closes: delete conversations, or export what you need.";

/** @returns {Promise<any>} the result of a request or the end of a transaction */
function settled(request) {
  return new Promise((resolve, reject) => {
    const fail = () => reject(request.error ?? new Error("the browser gave up the transaction"));
    request.addEventListener(request instanceof IDBTransaction ? "complete" : "success", () => resolve(request.result));
    const failures = request instanceof IDBTransaction ? ["abort"] : ["error", "blocked"];
    for (const event of failures) request.addEventListener(event, fail);
  });
}

async function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.addEventListener("upgradeneeded", () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
  });
  const database = await settled(request);
  database.addEventListener("versionchange", () => database.close());
  return database;
}

class Store extends EventTarget {
  /** Events: "saved"; "changed" with an id, from another tab; "trouble" with the text to show; the text is empty when the trouble is over. */
  constructor() {
    super();
    this.opening = openDatabase().catch(() => null);
    /** @type {Map<string, {record: ConversationRecord, messages: Map<string, Message>}>} */
    this.unsaved = new Map();
    this.removed = new Set(); // ids of deleted conversations, so that a late write does not restore them
    this.channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(DATABASE) : new EventTarget();
    this.channel.addEventListener("message", ({ data }) => this.dispatchEvent(new CustomEvent("changed", { detail: data })));
  }

  report(trouble) {
    this.dispatchEvent(new CustomEvent("trouble", { detail: trouble }));
  }

  /** Notify the other tabs. */
  tell(id, isGone = false) {
    this.channel.postMessage?.({ id, isGone });
  }

  /**
   * Run `work(conversations, messages)` in one transaction, and return its result if that is a request.
   * Throws the browser's error, also if there is no database.
   */
  async transact(mode, work) {
    const database = await this.opening;
    if (!database) throw new Error(NO_STORAGE);
    const transaction = database.transaction(["conversations", "messages"], mode);
    const result = work(transaction.objectStore("conversations"), transaction.objectStore("messages"));
    await settled(transaction);
    return result?.result;
  }

  /** The result of reading; `otherwise` if the browser raises an error. */
  async read(work, otherwise) {
    try {
      return (await this.transact("readonly", work)) ?? otherwise;
    } catch {
      this.report(NO_STORAGE);
      return otherwise;
    }
  }

  /** @returns {Promise<ConversationRecord[]>} the newest first */
  async list() {
    const records = new Map((await this.read((conversations) => conversations.getAll(), [])).map((one) => [one.id, one]));
    for (const [id, { record }] of this.unsaved) records.set(id, record);
    return [...records.values()].sort((a, b) => b.changed - a.changed);
  }

  /** @returns {Promise<Conversation | null>} */
  async load(id) {
    const record = this.unsaved.get(id)?.record ?? (await this.read((conversations) => conversations.get(id), null));
    if (!record) return null;
    const messages = await this.read((_, all) => all.index("conversation").getAll(id), []);
    // Of two equal versions the first one counts. A stored one may lack its images.
    return new Conversation(record, [...(this.unsaved.get(id)?.messages.values() ?? []), ...messages]);
  }

  /**
   * Write messages and some of the record's fields. Other fields keep the values that another tab has written.
   * @param {Conversation} conversation
   * @param {Iterable<Message>} messages
   * @param {(keyof ConversationRecord)[]} fields
   */
  async save(conversation, messages, fields) {
    const { id, record } = conversation;
    if (this.removed.has(id)) return;
    const pending = this.unsaved.get(id)?.messages ?? new Map();
    for (const message of conversation.isGone ? conversation.messages.values() : messages) {
      message.version++;
      pending.set(message.id, structuredClone(message));
    }
    conversation.isGone = false;
    const changes = Object.fromEntries(fields.map((name) => [name, record[name]]));
    try {
      await this.write(record, changes, [...pending.values()]);
      if (this.unsaved.delete(id)) this.report("");
    } catch (error) {
      this.unsaved.set(id, { record, messages: pending });
      this.report(error?.name === "QuotaExceededError" ? await this.writeTexts(record, changes, [...pending.values()]) : NO_STORAGE);
    }
    this.dispatchEvent(new Event("saved"));
  }

  async write(record, changes, messages) {
    await this.transact("readwrite", (conversations, all) => {
      const reading = conversations.get(record.id);
      reading.addEventListener("success", () => {
        conversations.put({ ...record, ...reading.result, ...changes });
        for (const message of messages) all.put(message);
      });
    });
    this.tell(record.id);
  }

  /** Write messages without their images, because the storage is full. Return the text to show. */
  async writeTexts(record, changes, messages) {
    if (!messages.some(({ images }) => images.length)) return FULL_STORAGE;
    try {
      await this.write(record, changes, messages.map((one) => ({ ...one, images: [] })));
      return FULL_OF_IMAGES;
    } catch {
      return FULL_STORAGE;
    }
  }

  /** Write a whole conversation, even a removed one. */
  async saveAll(conversation) {
    this.removed.delete(conversation.id);
    await this.save(conversation, conversation.messages.values(), []);
  }

  async remove(id) {
    this.removed.add(id);
    this.unsaved.delete(id);
    try {
      await this.transact("readwrite", (conversations, all) => {
        conversations.delete(id);
        const reading = all.index("conversation").getAllKeys(id);
        reading.addEventListener("success", () => reading.result.forEach((key) => all.delete(key)));
      });
      this.tell(id, true);
    } catch {
      this.report(NO_STORAGE);
    }
  }

  /**
   * Find conversations with `text` in their title or a message.
   * @returns {Promise<Map<string, string>>} an excerpt by id, empty for a title
   */
  async search(text) {
    const wanted = text.toLowerCase();
    const found = new Map();
    const messages = [...(await this.read((_, all) => all.getAll(), [])), ...[...this.unsaved.values()].flatMap((one) => [...one.messages.values()])];
    for (const { conversation, content } of messages) {
      const at = content.toLowerCase().indexOf(wanted);
      if (at !== -1) found.set(conversation, content.slice(Math.max(0, at - 20), at + 60).replace(/\s+/g, " "));
    }
    for (const { id, title } of await this.list()) if (title.toLowerCase().includes(wanted)) found.set(id, "");
    return found;
  }
}

const store = new Store();
