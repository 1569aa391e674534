// The part of the model's context that the visible path uses, as counted by the server with the last answer.

/** @param {Message[]} path */
function showMeter(path) {
  const counted = path.findLast((message) => message.tokens)?.tokens;
  const limit = chosenLimit();
  byId("meter").hidden = !counted || !limit;
  if (!counted || !limit) return;
  const used = counted.prompt + counted.completion;
  const meter = byId("meter-bar");
  meter.max = limit;
  meter.value = used;
  meter.high = 0.9 * limit;
  meter.ariaLabel = `Context: ${whole(used)} of ${whole(limit)} tokens`;
  show("meter-text", `${whole(used)} of ${whole(limit)} tokens`);
}
