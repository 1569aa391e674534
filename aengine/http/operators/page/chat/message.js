// Shows one message: its text, and buttons to edit, ask again, continue, copy, and switch between branches.

function button(label, act, className = "") {
  const node = make("button", { type: "button", className }, label);
  node.addEventListener("click", act);
  return node;
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // incomplete while it is streamed
  }
}

/**
 * The actions of a message's buttons.
 * @typedef {{edit: (message: Message, text: string) => void, again: (message: Message) => void, continueAnswer: (message: Message) => void, select: (message: Message, label: string) => void, branches: (message: Message) => Message[], isBusy: () => boolean}} MessageActions
 */

class MessageView {
  /**
   * @param {Message} message
   * @param {MessageActions} actions
   */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.frame = 0;
    this.branches = make("span", { className: "branches", hidden: true });
    this.edit = button("Edit", () => this.openEditor(), "edit");
    this.copy = button("Copy", () => copyText(this.message.content, this.copy, this.body), "copy");
    this.foot = make("div", { className: "foot" });
    if (message.role === "user") this.buildQuestion();
    else this.buildAnswer();
    this.images = make("div", { className: "images", hidden: !message.images.length }, ...message.images.map(imageNode));
    this.node = make("article", { className: "turn", ariaLabel: message.role === "user" ? "You" : "Answer" }, this.images, this.body, this.foot);
    this.draw(false);
  }

  buildQuestion() {
    this.asked = make("p");
    this.body = make("div", { className: "asked" }, this.asked);
    this.foot.className = "tools";
    this.foot.append(this.branches, this.edit, this.copy);
  }

  buildAnswer() {
    this.summary = make("summary", {}, "Thought");
    this.thoughts = make("p");
    this.thought = make("details", { className: "thought", hidden: true }, this.summary, this.thoughts);
    this.prose = make("div", { className: "prose" });
    this.calls = make("div", { className: "prose" });
    this.failure = make("div", { className: "failure", role: "alert", hidden: true }, make("p"), make("p"));
    this.waiting = make("div", { className: "dot", hidden: true });
    this.body = make("div", { className: "answer" }, this.waiting, this.thought, this.prose, this.calls, this.failure);
    this.again = button("Again", () => this.actions.again(this.message), "again");
    this.continueButton = button("Continue", () => this.actions.continueAnswer(this.message), "go-on");
    this.note = make("span", { className: "quiet figure" });
    this.foot.append(this.branches, this.continueButton, this.again, this.edit, this.copy, this.note);
    this.text = new Prose(this.prose);
  }

  /** Draw in the next frame. */
  grow() {
    this.frame ||= requestAnimationFrame(() => redraw(() => this.draw(true)));
  }

  draw(busy) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.node.ariaBusy = busy;
    this.drawBranches();
    this.edit.hidden = busy;
    this.copy.hidden = busy || !this.message.content;
    if (this.message.role === "assistant") this.drawAnswer(busy);
    else {
      this.asked.textContent = this.message.content;
      this.asked.hidden = !this.message.content;
    }
  }

  drawAnswer(busy) {
    const { content, reasoning, calls, note, failure, finish } = this.message;
    this.waiting.hidden = !busy || Boolean(content || reasoning || calls.length);
    this.thought.hidden = !reasoning;
    this.thoughts.textContent = reasoning;
    this.summary.textContent = busy && !content ? "Thinking…" : "Thought";
    this.text.show(content);
    this.calls.replaceChildren(...calls.filter(Boolean).map((one) => renderCode(indented(one.arguments), one.name)));
    this.failure.hidden = !failure;
    this.failure.firstChild.textContent = failure?.message ?? "";
    this.failure.lastChild.textContent = failure?.remedy ?? "";
    this.note.textContent = busy ? "" : note || (finish ? "" : "interrupted");
    this.again.hidden = busy;
    this.continueButton.hidden = busy || !content || calls.length > 0 || finish === "stop";
  }

  drawBranches() {
    const all = this.actions.branches(this.message);
    const at = all.indexOf(this.message);
    this.branches.hidden = all.length < 2;
    if (all.length < 2) return;
    const step = (sign, label, to) => {
      const node = button(sign, () => this.actions.select(all[to], label));
      return Object.assign(node, { ariaLabel: label, disabled: !all[to] });
    };
    const place = make("span", { className: "figure" }, `${at + 1}/${all.length}`);
    this.branches.replaceChildren(step("‹", "Previous branch", at - 1), place, step("›", "Next branch", at + 1));
  }

  /** Keep the focus on the button that switched to this branch, or on the other button if this one is disabled. */
  focusBranch(label) {
    const usable = [...this.branches.querySelectorAll("button:enabled")];
    (usable.find((one) => one.ariaLabel === label) ?? usable[0])?.focus();
  }

  openEditor() {
    if (this.actions.isBusy() || this.editor) return;
    const isQuestion = this.message.role === "user";
    const text = make("textarea", { value: this.message.content, ariaLabel: "Edit the message", rows: 3 });
    const close = () => {
      this.editor.replaceWith(this.body);
      this.editor = null;
      this.foot.hidden = false;
      this.edit.focus();
    };
    const save = () => {
      if ((!text.value.trim() && !this.message.images.length) || this.actions.isBusy()) return;
      close();
      this.actions.edit(this.message, text.value);
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      if (event.key === "Escape") close();
      if (event.key === "Escape") event.stopPropagation();
    });
    this.editor = make("div", { className: "editor" }, text, button("Cancel", close), button(isQuestion ? "Send" : "Save", save, "primary"));
    this.body.replaceWith(this.editor);
    this.foot.hidden = true;
    text.style.height = `${Math.min(text.scrollHeight + 4, innerHeight / 2)}px`;
    text.focus();
  }
}
