// Images for the next message: chosen, pasted or dropped.

/** @type {File[]} */
let attached = [];
let reading = 0; // calls of `attach` that have not ended

/** @param {File[]} files */
async function attach(files) {
  const problems = takesImages() ? [] : [models.length ? "The model takes no images." : "The model is not loaded yet."];
  reading++;
  showBusy();
  for (const file of takesImages() ? files : []) {
    try {
      attached.push(await readImage(file));
    } catch (error) {
      problems.push(error.message);
    }
  }
  reading--;
  showAttached();
  show("attach-note", problems.join(" "));
  byId("attach-note").hidden = !problems.length;
  if (!problems.length) show("spoken", `Attached ${files.map(({ name }) => name).join(", ")}.`);
  question.focus();
}

function showAttached() {
  byId("attached").replaceChildren(...attached.map(attachedItem));
  byId("attached").hidden = !attached.length;
  showBusy();
}

function attachedItem(file) {
  const remove = button("×", () => {
    attached = attached.filter((one) => one !== file);
    showAttached();
    question.focus();
  });
  remove.ariaLabel = `Remove ${file.name}`;
  return make("li", {}, imageNode(file), remove);
}

/** Take the images out of the field for a new message. */
function takeAttached() {
  const images = attached;
  attached = [];
  byId("attach-note").hidden = true;
  showAttached();
  return images;
}

/** Show the button if the chosen model takes images. */
function offerImages() {
  byId("attach").hidden = !takesImages();
}

byId("attach").addEventListener("click", () => byId("attach-files").click());
byId("attach-files").addEventListener("change", async () => {
  const files = [...byId("attach-files").files];
  byId("attach-files").value = "";
  await attach(files);
});
question.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return; // a table is copied as text and as an image
  event.preventDefault();
  attach([...files]);
});

const dropPlace = byId("chat");
const hasFiles = (event) => event.dataTransfer.types.includes("Files");
dropPlace.addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  dropPlace.classList.add("dropping");
});
dropPlace.addEventListener("dragleave", (event) => {
  if (!dropPlace.contains(event.relatedTarget)) dropPlace.classList.remove("dropping");
});
dropPlace.addEventListener("drop", (event) => {
  dropPlace.classList.remove("dropping");
  if (!hasFiles(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
