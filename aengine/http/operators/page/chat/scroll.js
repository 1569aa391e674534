// The log's scroll position: at the end it follows new text; further up it stays.

const log = byId("log");
const NEAR = 48; // pixels that still count as the end
let isFollowing = true; // whether the end was in view when the reader last scrolled
let shape = ""; // the log's size; scroll events after a change of it are not the reader's

const shapeOf = () => `${log.clientWidth} ${log.clientHeight}`;
const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
const offerEnd = () => (byId("to-end").hidden = isAtEnd());

function scrollToEnd() {
  isFollowing = true;
  log.scrollTop = log.scrollHeight;
  offerEnd();
}

/** Change the log's content. */
function redraw(change) {
  change();
  if (isFollowing) log.scrollTop = log.scrollHeight;
  offerEnd();
}

log.addEventListener("scroll", () => {
  if (shape === shapeOf()) isFollowing = isAtEnd();
  offerEnd();
});
new ResizeObserver(() => {
  shape = shapeOf();
  redraw(() => {});
}).observe(log);
byId("to-end").addEventListener("click", scrollToEnd);
