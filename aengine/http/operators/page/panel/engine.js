// The engine's live figures, once a second while the panel is visible.

const SECOND = 1000;
const SAMPLES = 60;
let rates = []; // tokens per second; null if unknown
let lastSample = null; // the tokens that the server had generated, and when it said so: { at, tokens }
let modelShown = false;

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const happens = (event) => new Promise((resolve) => document.addEventListener(event, resolve, { once: true }));

async function watchEngine() {
  for (;;) {
    while (document.hidden) {
      lastSample = null; // an average over the hidden time is not the present rate
      await happens("visibilitychange");
    }
    let wait = SECOND;
    try {
      await pollEngine();
    } catch (error) {
      forget(error.code === "invalid_api_key" ? "The live view needs the API key, too." : error.message);
      if (error.code === "invalid_api_key") await happens("aengine-key");
      else wait = 3 * SECOND;
    }
    await pause(wait);
  }
}

async function pollEngine() {
  const response = await call("metrics");
  if (!response.ok) throw await refusalOf(response);
  const now = readMetrics(await response.text());
  if (!now.aengine_ready) {
    const { status, reason } = await (await call("health")).json();
    forget(reason || `The engine is ${status}.`);
    return;
  }
  byId("engine-note").hidden = true;
  if (!modelShown) await showModels();
  modelShown = true;
  showEngine(now);
  showRate(now.aengine_generated_tokens_total);
}

/** The samples without further labels, by name, summed over replicas and proposers. */
function readMetrics(text) {
  const samples = {};
  for (const [, name, value] of text.matchAll(/^(\w+)(?:\{(?:,?(?:replica|proposer)="[^"]*")+\})? (\S+)$/gm)) {
    samples[name] = (samples[name] ?? 0) + Number(value);
  }
  return samples;
}

function showEngine(now) {
  const [pages, used, cached, free] = ["", "_used", "_cached", "_free"].map((end) => now[`aengine_kv_pages${end}`]);
  show("running", whole(now.aengine_requests_running));
  show("waiting", whole(now.aengine_requests_waiting));
  const found = now.aengine_cached_tokens_total / Math.max(1, now.aengine_prompt_tokens_total);
  show("hit-rate", `${Math.round(100 * found)} %`);
  showSpeculation(now);
  show("pages-used", whole(used));
  show("pages-cached", whole(cached));
  show("pages-free", whole(free));
  byId("bar-used").style.width = `${(100 * used) / pages}%`;
  byId("bar-cached").style.width = `${(100 * cached) / pages}%`;
  byId("pages").ariaLabel = `KV pages: ${used} used, ${cached} cached, ${free} free of ${pages}`;
}

/** Shows how many drafts were accepted, and how many tokens a step brings to a sequence with drafts. */
function showSpeculation(now) {
  const [drafted, accepted, verified] = ["drafted_tokens", "accepted_tokens", "verifications"].map(
    (name) => now[`aengine_speculation_${name}_total`],
  );
  byId("speculation").hidden = drafted === undefined;
  show("accepted", drafted ? `${Math.round((100 * accepted) / drafted)} %` : "–");
  show("accepted-length", verified ? (1 + accepted / verified).toFixed(2) : "–");
}

function showRate(tokens) {
  const at = performance.now();
  const known = lastSample !== null && tokens >= lastSample.tokens; // fewer: the engine was restarted
  const rate = known ? (SECOND * (tokens - lastSample.tokens)) / (at - lastSample.at) : null;
  lastSample = { at, tokens };
  rates = [...rates, rate].slice(-SAMPLES);
  const peak = Math.max(...rates);
  show("rate", rate === null ? "–" : figure(rate));
  show("glance", `${rate === null ? "–" : figure(rate)} tok/s`);
  show("rates-peak", `peak ${figure(peak)}`);
  byId("rates").ariaLabel = `Tokens per second: now ${figure(rate ?? 0)}, at most ${figure(peak)} in the last minute`;
  drawRates(peak || 1);
}

function drawRates(peak) {
  const left = SAMPLES - rates.length;
  const points = rates.map((rate, index) => `${left + index + 1},${(19.5 - (18.5 * (rate ?? 0)) / peak).toFixed(2)}`);
  byId("rates-line").setAttribute("d", `M${points.join("L")}`);
  byId("rates-area").setAttribute("d", `M${left + 1},20L${points.join("L")}L${SAMPLES},20Z`);
}

/** Show why there are no figures. */
function forget(why) {
  lastSample = null;
  modelShown = false;
  show("engine-note", why);
  byId("engine-note").hidden = false;
  byId("speculation").hidden = true;
  for (const id of ["rate", "running", "waiting", "hit-rate", "pages-used", "pages-cached", "pages-free"]) show(id, "–");
  show("glance", "– tok/s");
}
