// A conversation: a tree of messages, of which one path from the root to a leaf is shown. Editing or asking again adds a
// sibling, so nothing is overwritten.

/**
 * @typedef {{id: string, name: string, arguments: string}} Call
 * @typedef {{message: string, remedy: string}} Failure
 * @typedef {{prompt: number, completion: number}} Tokens the server's count for this answer
 *
 * `version` counts writes. `finish` is the server's reason, or "stopped", "failed", "edited". It is empty while the answer is streamed, or if the tab was closed then.
 * @typedef {{id: string, conversation: string, parent: string | null, role: "user" | "assistant", created: number, content: string, images: File[],
 *   reasoning: string, calls: Call[], finish: string, note: string, model: string, failure: Failure | null, tokens: Tokens | null, version: number}} Message
 *
 * @typedef {{id: string, title: string, created: number, changed: number, leaf: string | null, system: string, model: string}} ConversationRecord
 */

const TITLE_LENGTH = 60;
const newId = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

const titleOf = (text) => {
  const line = text.trim().split("\n", 1)[0];
  return (line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line) || "Conversation";
};

class Conversation {
  /**
   * @param {Partial<ConversationRecord>} record
   * @param {Message[]} messages
   */
  constructor(record = {}, messages = []) {
    const now = Date.now();
    /** @type {ConversationRecord} */
    this.record = { id: newId(), title: "", created: now, changed: now, leaf: null, system: "", model: "", ...record };
    /** @type {Map<string, Message>} */
    this.messages = new Map();
    /** @type {Map<string | null, Message[]>} by parent */
    this.branches = new Map();
    this.isGone = false; // another tab deleted it; the next save writes all of it again
    this.merge(messages);
  }

  get id() {
    return this.record.id;
  }

  /** Add stored messages. Known messages keep their identity, and their newer fields. */
  merge(messages) {
    for (const message of messages) {
      const known = this.messages.get(message.id);
      if (!known) this.keep(message);
      else if (message.version > known.version) Object.assign(known, message);
    }
  }

  keep(message) {
    message.images ??= []; // earlier versions stored none
    this.messages.set(message.id, message);
    const branches = this.branches.get(message.parent);
    if (branches) branches.push(message);
    else this.branches.set(message.parent, [message]);
  }

  /** The visible messages. */
  path() {
    const path = [];
    const seen = new Set();
    let at = this.messages.get(this.record.leaf);
    for (; at && !seen.has(at.id); at = this.messages.get(at.parent)) {
      seen.add(at.id);
      path.push(at);
    }
    return path.reverse();
  }

  children(parent) {
    return [...(this.branches.get(parent) ?? [])].sort((a, b) => a.created - b.created);
  }

  /** The branches at a message, including itself. */
  siblings(message) {
    return this.children(message.parent).filter((one) => one.role === message.role);
  }

  /** Show the branch with `message`, down to its newest leaf. */
  select(message) {
    const seen = new Set();
    let leaf = message;
    for (let next = leaf; next && !seen.has(next.id); next = this.children(leaf.id).at(-1)) {
      seen.add(next.id);
      leaf = next;
    }
    this.record.leaf = leaf.id;
  }

  /**
   * Add a message below `parent` and show it.
   * @returns {Message}
   */
  add(parent, role, content, more = {}) {
    const last = Math.max(0, ...this.children(parent).map((one) => one.created));
    const message = {
      id: newId(), conversation: this.id, parent, role, created: Math.max(Date.now(), last + 1), content,
      images: [], reasoning: "", calls: [], finish: "", note: "", model: "", failure: null, tokens: null, version: 0, ...more,
    };
    this.keep(message);
    this.record.leaf = message.id;
    this.record.changed = message.created;
    if (!this.record.title) this.record.title = titleOf(content || (message.images.length ? "Image" : ""));
    return message;
  }
}
