// Images of messages: read from files, scaled down, shown, and written as data URLs.

const LONGEST_SIDE = 2048; // in pixels; enough to read a page of small print
const MOST_BYTES = 4 * 2 ** 20; // of a file that is sent as it is
const SENT_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const IMAGE_URL = /^data:(image\/(?:png|jpeg|webp|gif));base64,/;

/**
 * The image of a file, as it is stored and sent. Large images and other formats become JPEGs, with white for what is
 * transparent. Throws an error that can be shown.
 * @param {File} file
 * @returns {Promise<File>}
 */
async function readImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no image that this browser can read.`);
  });
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const isSentAsIs = scale === 1 && file.size <= MOST_BYTES && SENT_TYPES.includes(file.type);
  // A copy, because the file on the disk may change.
  const content = isSentAsIs ? await file.arrayBuffer() : await scaled(bitmap, scale);
  bitmap.close();
  return new File([content], file.name, { type: isSentAsIs ? file.type : "image/jpeg" });
}

function scaled(bitmap, scale) {
  const side = (length) => Math.max(1, Math.round(scale * length));
  const canvas = make("canvas", { width: side(bitmap.width), height: side(bitmap.height) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
}

/** @returns {Promise<string>} */
function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`The image ${file.name} can no longer be read.`)));
    reader.readAsDataURL(file);
  });
}

/** The image of a data URL; null if it is none. */
function imageOf(url) {
  const type = IMAGE_URL.exec(url)?.[1];
  if (!type) return null;
  try {
    const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (one) => one.charCodeAt(0));
    return new File([bytes], "image", { type });
  } catch {
    return null; // no base64
  }
}

function imageNode(file) {
  const url = URL.createObjectURL(file);
  const node = make("img", { src: url, alt: file.name, title: file.name, draggable: false });
  for (const event of ["load", "error"]) {
    node.addEventListener(event, () => {
      URL.revokeObjectURL(url);
      redraw(() => {}); // it may have grown
    });
  }
  return node;
}
