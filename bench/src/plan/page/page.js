"use strict";
// The planner's page: fleet.rs's arithmetic, line by line, under sliders. At its start it computes the cases that the program has
// embedded beside it, and says whether both agree.

/**
 * @typedef {{ key: string, group: string, name: string, unit: string, value: number, range: [number, number], source: string }} Row
 * @typedef {Record<string, number>} Values
 * @typedef {{ name: string, changes: [string, number][], note: string }} Lever
 * @typedef {{ changes: Values, fleet: Record<string, number | null> }} Case
 * @typedef {{ rows: Row[], values: Values, models: Record<string, unknown>[], hardware: Record<string, unknown>[], levers: Lever[],
 *   cases: Case[], spot_discount: number, hours_per_month: number, less: number, more: number }} Data
 */

/** @type {Data} */
const DATA = JSON.parse(element("data").textContent ?? "");
const DAY_S = 86_400;
const DAY_POINTS = 96;
const WEIGHTS_MAX = 0.7;
const GPUS_PER_INSTANCE_MAX = 64;
const SLIDER_STEPS = 1000;

/** @param {string} id */
function element(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/** @param {(gpus: number) => number} weightsGb @param {number} freeGb */
function leastGpus(weightsGb, freeGb) {
  let gpus = 1;
  while (weightsGb(gpus) > WEIGHTS_MAX * freeGb && gpus < GPUS_PER_INSTANCE_MAX) gpus *= 2;
  return gpus;
}

/** @param {number} swing */
function meanOverPeak(swing) {
  let sum = 0;
  for (let point = 0; point < DAY_POINTS; point++) sum += swing ** ((Math.cos((2 * Math.PI * point) / DAY_POINTS) - 1) / 2);
  return sum / DAY_POINTS;
}

/** @param {Values} a @returns {Values} */
function plan(a) {
  /** @param {string} key */
  const v = (key) => {
    const value = a[key];
    if (value === undefined) throw new Error(`there is no assumption ${key}`);
    return value;
  };
  const turns_per_day = v("users") * v("sessions") * v("turns");
  const mean_requests_per_s = turns_per_day / DAY_S;
  const peak_requests_per_s = mean_requests_per_s * v("peak");
  const own = 1 - v("small_share");
  const computed = v("input_tokens") * (1 - v("prefix_hit"));
  const peak_prompt_tokens_per_s = peak_requests_per_s * computed;
  const peak_output_tokens_per_s = peak_requests_per_s * v("output_tokens");
  const turns_in_flight = peak_requests_per_s * (v("ttft_s") + (v("output_tokens") * v("tpot_ms")) / 1e3);

  const kv_layers = v("kv_layers") > 0 ? v("kv_layers") : v("layers");
  const kv_numbers = v("kv_latent") > 0 ? v("kv_latent") : 2 * v("kv_heads") * v("head_dim");
  const kv_bytes_per_token = (kv_layers * kv_numbers * v("kv_bits")) / 8;
  const kv_gb_per_turn = ((v("input_tokens") + v("output_tokens") / 2) * kv_bytes_per_token) / 1e9;
  const weights_gb = (v("params_b") * v("weight_bits")) / 8;
  const free_gb = v("memory_gb") - v("reserve_gb");
  const stages = Math.max(Math.floor(v("stages")), 1);
  const is_spread = v("expert_parallel") > 0.5 && v("experts") > v("experts_used");
  const experts_b = ((v("params_b") - v("active_b")) / (v("experts") - v("experts_used"))) * v("experts");
  const experts_gb = is_spread ? (Math.min(experts_b, v("params_b")) * v("weight_bits")) / 8 : 0;
  /** @param {number} gpus */
  const weights_per_gpu = (gpus) => (is_spread ? (weights_gb - experts_gb) / stages + experts_gb / gpus : weights_gb / gpus);
  const gpus_per_instance = v("tp") > 0 ? v("tp") : leastGpus(weights_per_gpu, free_gb);
  const weights_gb_per_gpu = weights_per_gpu(gpus_per_instance);
  const kv_gb_per_gpu = free_gb - weights_gb_per_gpu;
  const ranks = Math.max(gpus_per_instance / stages, 1);
  const kv_heads = v("kv_latent") > 0 ? 1 : v("kv_heads");
  const kv_copies = is_spread ? 1 : Math.max(ranks / kv_heads, 1);
  const kv_gb_per_turn_per_gpu = (kv_gb_per_turn * kv_copies) / gpus_per_instance;

  const of_others = (ranks - 1) / ranks;
  const numbers = v("all_reduce") > 0.5 ? 2 * 2 * v("hidden") : v("heads") * v("head_dim") + 2 * v("hidden") + v("intermediate");
  const to_experts_and_back = (v("experts_used") * v("hidden") * (8 + v("link_bits"))) / 8;
  const collective_bytes = of_others * (is_spread ? to_experts_and_back : (numbers * v("link_bits")) / 8);
  const stage_bytes = stages > 1 ? (v("hidden") * v("link_bits")) / 8 : 0;
  const near = Math.max(Math.min(ranks, v("link_gpus")) - 1, 0);
  /** @param {number} gpus */
  const share = (gpus) => (ranks > 1 ? gpus / (ranks - 1) : 0);
  const s_per_byte = Math.max(share(near) / v("link_gb_s"), share(ranks - 1 - near) / v("nic_gb_s")) / 1e9;
  const layers = is_spread && v("expert_layers") > 0 ? v("expert_layers") : v("layers");
  const rows_together = is_spread ? ranks : 1;
  const hops_s = (((stages - 1) / stages) * stage_bytes) / (v("nic_gb_s") * 1e9);
  const row_s = (layers * collective_bytes * s_per_byte) / (stages * rows_together) + hops_s;

  const bytes_s = v("bandwidth_gb_s") * v("memory_efficiency");
  const flops = v("tflops") * 1e12 * v("flops_efficiency");
  const token_flops = 2 * v("active_b") * 1e9;
  const weights_s = (stages * weights_gb_per_gpu) / bytes_s;
  const by_memory = kv_gb_per_gpu / kv_gb_per_turn_per_gpu;
  const by_time = (v("tpot_ms") / 1e3 - weights_s) / (kv_gb_per_turn_per_gpu / bytes_s + row_s);
  const by_compute = v("tpot_ms") / 1e3 / (token_flops / (flops * gpus_per_instance) + row_s);
  const batch = Math.max(Math.min(by_memory, by_time, by_compute, v("sequences_max")), 0);
  const step_s = Math.max(weights_s + (batch * kv_gb_per_turn_per_gpu) / bytes_s, (batch * token_flops) / (flops * gpus_per_instance)) + batch * row_s;
  const decode_tok_s_per_gpu = v("decode_tok_s") > 0 ? v("decode_tok_s") : batch / step_s / gpus_per_instance;
  const attention_flops = (4 * kv_layers * v("heads") * v("head_dim") * v("input_tokens")) / 2;
  const prefill_tok_s_per_gpu = v("prefill_tok_s") > 0 ? v("prefill_tok_s") : 1 / ((token_flops + attention_flops) / flops + gpus_per_instance * row_s);

  const prefill_needed = peak_prompt_tokens_per_s / (prefill_tok_s_per_gpu * v("utilization"));
  const decode_needed = peak_output_tokens_per_s / decode_tok_s_per_gpu;
  /** @param {number} needed */
  const instances = (needed) => Math.max(Math.ceil((needed * v("headroom")) / gpus_per_instance - 1e-9), 0) * gpus_per_instance;
  const prefill_gpus = instances(own * prefill_needed);
  const decode_gpus = instances(own * decode_needed);
  const small_needed = v("small_share") * v("small_cost") * (prefill_needed + decode_needed);
  const small_model_gpus = Math.max(Math.ceil(small_needed * v("headroom") - 1e-9), 0);
  const gpus = prefill_gpus + decode_gpus + small_model_gpus;

  const prompt_s = computed / (prefill_tok_s_per_gpu * gpus_per_instance);
  const busy = Math.min((own * prefill_needed * v("utilization")) / Math.max(prefill_gpus, gpus_per_instance), 0.99);
  const ttft_s = prompt_s * (1 + busy / (2 * (1 - busy))) + step_s;

  const kept_gb_s = ((computed + v("output_tokens")) * kv_bytes_per_token) / 1e9;
  const network_gb_s = (own * peak_requests_per_s * (computed + v("input_tokens")) * kv_bytes_per_token) / 1e9;
  const running = v("autoscaled") * meanOverPeak(v("swing")) + 1 - v("autoscaled");
  const dollars_per_month = gpus * v("price_h") * DATA.hours_per_month * running * (1 - v("spot_share") * DATA.spot_discount);
  const turns_per_month = mean_requests_per_s * 3600 * DATA.hours_per_month;
  return {
    turns_per_day,
    output_tokens_per_day: turns_per_day * v("output_tokens"),
    mean_requests_per_s,
    peak_requests_per_s,
    mean_output_tokens_per_s: mean_requests_per_s * v("output_tokens"),
    peak_output_tokens_per_s,
    peak_prompt_tokens_per_s,
    turns_in_flight,
    kv_bytes_per_token,
    kv_gb_per_turn,
    kv_in_flight_gb: turns_in_flight * kv_gb_per_turn,
    weights_gb,
    gpus_per_instance,
    weights_gb_per_gpu,
    kv_gb_per_gpu,
    kv_bytes_per_token_per_gpu: (kv_bytes_per_token * kv_copies) / gpus_per_instance,
    collective_bytes,
    stage_bytes,
    collective_ms: batch * row_s * 1e3,
    collective_prompt_ms: 1e3 * row_s * 1e3,
    batch,
    step_ms: step_s * 1e3,
    decode_tok_s_per_gpu,
    prefill_tok_s_per_gpu,
    ttft_s,
    prefill_gpus,
    decode_gpus,
    small_model_gpus,
    gpus,
    pool_dram_gb: own * peak_requests_per_s * 60 * v("dram_minutes") * kept_gb_s,
    pool_nvme_gb: own * mean_requests_per_s * 3600 * v("nvme_hours") * kept_gb_s,
    network_gb_s,
    network_share: network_gb_s / (Math.max(gpus, 1) * v("nic_gb_s")),
    dollars_per_month,
    dollars_per_million_output_tokens: dollars_per_month / ((turns_per_month * v("output_tokens")) / 1e6),
    dollars_per_turn: dollars_per_month / turns_per_month,
  };
}

/** The largest relative difference between the program's fleets and this page's. */
function difference() {
  let largest = 0;
  for (const { changes, fleet } of DATA.cases) {
    const ours = plan({ ...DATA.values, ...changes });
    for (const [key, theirs] of Object.entries(fleet)) {
      const mine = ours[key] ?? NaN;
      // JSON has no infinity.
      if (theirs === null && !Number.isFinite(mine)) continue;
      const off = Math.abs(mine - (theirs ?? 0)) / Math.max(Math.abs(theirs ?? 0), 1e-12);
      if (!(off <= largest)) largest = off;
    }
  }
  return largest;
}

/** @param {number} value */
function short(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return "–";
  for (const [unit, power] of /** @type {[string, number][]} */ ([["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])) {
    if (size >= 10 * power || (size >= power && power > 1e3)) return `${trimmed(value / power)}${unit}`;
  }
  return size > 0 && size < 0.01 ? value.toPrecision(3) : trimmed(value);
}

/** @param {number} value */
function trimmed(value) {
  return Number(value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2)).toLocaleString("en-US", { maximumFractionDigits: 2 });
}

/** @param {number} value */
const dollars = (value) => `$${short(value)}`;

/** Name, key, how it is written, and what a tooltip says.
 * @type {[string, string, (value: number) => string, string][]} */
const FIGURES = [
  ["GPUs", "gpus", short, "prefill, decode and a small model's"],
  ["a month", "dollars_per_month", dollars, "at the price per GPU and hour"],
  ["per million output tokens", "dollars_per_million_output_tokens", dollars, ""],
  ["per turn", "dollars_per_turn", dollars, ""],
  ["GPUs that prefill", "prefill_gpus", short, ""],
  ["GPUs that decode", "decode_gpus", short, ""],
  ["GPUs per instance", "gpus_per_instance", short, ""],
  ["requests/s at peak", "peak_requests_per_s", short, ""],
  ["output tokens/s at peak", "peak_output_tokens_per_s", short, ""],
  ["turns in flight", "turns_in_flight", short, "by Little's law"],
  ["KV per token", "kv_bytes_per_token", (v) => `${trimmed(v / 1024)} KiB`, "2 × layers × KV heads × dimension × bytes"],
  ["KV in flight", "kv_in_flight_gb", (v) => `${short(v * 1e9)}B`, ""],
  ["sequences per step", "batch", short, "by memory, by the limit per token, by the engine"],
  ["time of a step", "step_ms", (v) => `${trimmed(v)} ms`, ""],
  ["weights per GPU", "weights_gb_per_gpu", (v) => `${trimmed(v)} GB`, "of an instance's stages and ranks"],
  ["KV per token and GPU", "kv_bytes_per_token_per_gpu", (v) => `${trimmed(v / 1024)} KiB`, "a KV head, or a latent, is on each GPU that needs it"],
  ["collectives, per row and layer", "collective_bytes", (v) => `${trimmed(v / 1024)} KiB`, "received by a GPU"],
  ["collectives of a step", "collective_ms", (v) => `${trimmed(v)} ms`, "at the links' rate, without latency, beside nothing else"],
  ["the same for 1,000 prompt tokens", "collective_prompt_ms", (v) => `${trimmed(v)} ms`, ""],
  ["output tokens/s of a GPU", "decode_tok_s_per_gpu", short, ""],
  ["prompt tokens/s of a GPU", "prefill_tok_s_per_gpu", short, ""],
  ["mean TTFT at peak", "ttft_s", (v) => `${trimmed(v)} s`, ""],
  ["pool, DRAM", "pool_dram_gb", (v) => `${short(v * 1e9)}B`, ""],
  ["pool, NVMe", "pool_nvme_gb", (v) => `${short(v * 1e9)}B`, ""],
  ["network at peak", "network_gb_s", (v) => `${short(v * 1e9)}B/s`, ""],
  ["share of the network", "network_share", (v) => `${trimmed(100 * v)} %`, ""],
];

/** @type {Values} */
const values = { ...DATA.values };

/** A slider is logarithmic where its range spans decades from above 0. @param {Row} row */
const isLog = (row) => row.range[0] > 0 && row.range[1] / row.range[0] >= 50;

/** @param {Row} row @param {number} place */
function valueAt(row, place) {
  const [low, high] = row.range;
  const share = place / SLIDER_STEPS;
  const value = isLog(row) ? low * (high / low) ** share : low + (high - low) * share;
  return row.unit === "share" ? Number(value.toFixed(3)) : Number(value.toPrecision(3));
}

/** @param {Row} row @param {number} value */
function placeOf(row, value) {
  const [low, high] = row.range;
  const share = isLog(row) ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
  return Math.round(SLIDER_STEPS * Math.min(Math.max(share, 0), 1));
}

/** @param {string} name @param {Record<string, string>} attributes @param {(Node | string)[]} children */
function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Shows a value at its slider and in its field. @param {Row} row */
function showRow(row) {
  const value = values[row.key] ?? 0;
  const slider = /** @type {HTMLInputElement} */ (element(`slider-${row.key}`));
  const field = /** @type {HTMLInputElement} */ (element(`field-${row.key}`));
  slider.value = String(placeOf(row, value));
  if (document.activeElement !== field) field.value = String(value);
}

function controls() {
  const groups = [...new Set(DATA.rows.map((row) => row.group))];
  for (const group of groups) {
    const box = make("details", { open: "" }, make("summary", {}, group));
    for (const row of DATA.rows.filter((row) => row.group === group)) {
      const slider = make("input", { type: "range", id: `slider-${row.key}`, min: "0", max: String(SLIDER_STEPS), "aria-label": row.name });
      const field = make("input", { type: "number", id: `field-${row.key}`, step: "any", min: "0", "aria-label": row.name });
      slider.addEventListener("input", () => change(row, valueAt(row, Number(/** @type {HTMLInputElement} */ (slider).value))));
      field.addEventListener("input", () => {
        const value = /** @type {HTMLInputElement} */ (field).valueAsNumber;
        const least = row.range[0] > 0 && row.unit !== "share" ? Number.MIN_VALUE : 0;
        const isGood = value >= least && value <= (row.unit === "share" ? 1 : 1e12);
        field.classList.toggle("wrong", !isGood);
        if (isGood) change(row, value);
      });
      box.append(make("label", { class: "row", title: row.source }, make("span", {}, row.unit ? `${row.name}, ${row.unit}` : row.name), slider, field, make("small", {}, row.source)));
    }
    element("controls").append(box);
  }
}

/** @param {string} id @param {Record<string, unknown>[]} rows */
function choice(id, rows) {
  const select = /** @type {HTMLSelectElement} */ (element(id));
  select.append(make("option", { value: "" }, "as below"), ...rows.map((row) => make("option", {}, String(row["name"]))));
  select.addEventListener("change", () => {
    for (const [key, value] of Object.entries(rows.find((row) => row["name"] === select.value) ?? {})) {
      if (typeof value === "number") values[key] = value;
    }
    show();
  });
}

/** @param {Row} row @param {number} value */
function change(row, value) {
  values[row.key] = value;
  show();
}

function warnings(/** @type {Values} */ fleet) {
  const f = /** @type {Record<string, number>} */ (fleet);
  const said = [];
  if ((f["kv_gb_per_gpu"] ?? 0) <= 0) said.push(`the weights do not fit ${f["gpus_per_instance"]} GPUs: more GPUs per instance`);
  else if ((f["batch"] ?? 0) < 1 && values["decode_tok_s"] === 0) said.push("not even one sequence decodes within the limit per token");
  const stages = Math.max(Math.floor(values["stages"] ?? 1), 1);
  if ((f["gpus_per_instance"] ?? 0) % stages !== 0) said.push(`${f["gpus_per_instance"]} GPUs cannot be shared out over ${stages} stages evenly`);
  if ((f["ttft_s"] ?? 0) > (values["ttft_s"] ?? 0)) said.push("the mean TTFT at peak is above its limit");
  if ((f["network_share"] ?? 0) > 0.7) said.push("K and V fill the network");
  return said;
}

/** The month's cost with one assumption a fifth less and a quarter more. */
function sensitivities(/** @type {number} */ base) {
  const of = (/** @type {Row} */ row, /** @type {number} */ factor) => {
    const value = (values[row.key] ?? 0) * factor;
    return plan({ ...values, [row.key]: row.unit === "share" ? Math.min(value, 1) : value })["dollars_per_month"] ?? 0;
  };
  return DATA.rows
    .map((row) => ({ row, less: of(row, DATA.less) / base - 1, more: of(row, DATA.more) / base - 1 }))
    .map((entry) => ({ ...entry, spread: Math.max(Math.abs(entry.less), Math.abs(entry.more)) }))
    .filter((entry) => entry.spread > 1e-6)
    .sort((a, b) => b.spread - a.spread);
}

/** @param {number} share */
const percent = (share) => `${share > 0 ? "+" : ""}${(100 * share).toFixed(1)} %`;

function show() {
  DATA.rows.forEach(showRow);
  const fleet = plan(values);
  element("figures").replaceChildren(
    ...FIGURES.map(([name, key, write, note], place) =>
      make("div", { class: place < 3 ? "figure large" : "figure", title: note }, make("b", { id: `figure-${key}` }, write(fleet[key] ?? NaN)), make("span", {}, name)),
    ),
  );
  element("warnings").replaceChildren(...warnings(fleet).map((text) => make("p", {}, text)));
  const base = fleet["dollars_per_month"] ?? 0;
  element("levers").replaceChildren(
    ...DATA.levers.map(({ name, changes, note }) => {
      const cost = plan({ ...values, ...Object.fromEntries(changes) })["dollars_per_month"] ?? 0;
      return make("tr", { title: note }, make("td", {}, name), make("td", {}, dollars(cost)), make("td", {}, base > 0 ? percent(cost / base - 1) : "–"));
    }),
  );
  const all = base > 0 ? sensitivities(base).slice(0, 14) : [];
  const widest = all[0]?.spread ?? 1;
  element("sensitivity").replaceChildren(
    ...all.map(({ row, less, more, spread }) => {
      const bar = make("div", { class: "bar" });
      bar.style.width = `${(100 * spread) / widest}%`;
      return make("tr", {}, make("td", {}, row.name), make("td", {}, percent(less)), make("td", {}, percent(more)), make("td", { class: "wide" }, bar));
    }),
  );
}

controls();
choice("model", DATA.models);
choice("hardware", DATA.hardware);
show();
const off = difference();
const check = element("check");
check.dataset["state"] = off <= 1e-9 ? "ok" : "wrong";
check.textContent = off <= 1e-9
  ? `This page's arithmetic agrees with the program's in ${DATA.cases.length} cases.`
  : `This page's arithmetic differs from the program's by ${off}: do not trust it.`;
