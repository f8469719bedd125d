// The panel beside the first screen: one call as a waterfall, or one tenant.

const load = async (address) => {
  const headers = store.token ? {authorization: `Bearer ${store.token}`} : {};
  const answer = await fetch(address, {headers, cache: "no-store"});
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`the gateway answered ${answer.status}`);
  return answer.json();
};

// Fetches what the fragment names, unless it is there.
const fill = async () => {
  const {open: wanted} = chosen;
  if (!wanted || !store.data) return;
  const key = `${wanted.kind} ${wanted.id} ${wanted.of || ""}`;
  if (store.details && store.details.key === key) return;
  const before = store.details;
  store.details = {key, state: "loading", data: before && before.kind === wanted.kind && before.id === wanted.id ? before.data : undefined,
    kind: wanted.kind, id: wanted.id};
  try {
    let data;
    if (wanted.kind === "call") {
      const [id, trace] = wanted.id.split(" ");
      const found = await load(`/decisions/${encodeURIComponent(id)}`);
      data = found && (found.decisions.find((each) => each.trace_id === trace) || found.decisions[0]);
    } else {
      const [kind, name] = (wanted.of || "").split(/:(.*)/s);
      const query = kind === "model" || kind === "service" ? `?${kind}=${encodeURIComponent(name)}` : "";
      data = await load(`/console/tenants/${encodeURIComponent(wanted.id)}${query}`);
    }
    if (store.details.key === key) store.details = {...store.details, state: "here", data};
  } catch (error) {
    if (store.details && store.details.key === key) store.details = {...store.details, state: "failed", problem: error.message};
  }
  update();
};

const STAGES = {receive: "receive body", queue: "queue", connect: "connect", upstream: "upstream", answer: "answer"};
const timing = (text) => String(text || "").split(",").map((entry) => {
  const [name, ...parameters] = entry.trim().split(";");
  const found = parameters.map((each) => each.trim()).find((each) => each.startsWith("dur="));
  return [name.trim(), found ? Number(found.slice(4).replaceAll('"', "")) : NaN];
}).filter(([name, ms]) => name && Number.isFinite(ms) && ms >= 0).slice(0, 40);

// [{name, from, ms, depth}] in milliseconds: the gateway's stages one after the other, and inside `upstream` what the
// servers reported, whose beginnings are not known: each begins where the one before it ended, within the one around it.
const spans = (call) => {
  const rows = [];
  let from = 0;
  for (const [stage, ms] of Object.entries(call.stages_ms || {})) {
    if (stage === "total") continue;
    rows.push({name: STAGES[stage] || stage, from, ms, depth: 0});
    if (stage === "upstream") {
      const parts = timing(call.server_timing);
      const logic = parts.find(([name]) => name === "logic");
      const inLogic = Boolean(logic);
      let at = from;
      if (inLogic) rows.push({name: "logic", from: at, ms: logic[1], depth: 1});
      for (const [name, part] of parts) {
        if (name === "logic") continue;
        const model = name === "queue" || name === "compute";
        rows.push({name: model ? `model ${name}` : name.replace(/^logic-/, ""), from: at, ms: part, depth: inLogic ? 2 : 1});
        at = Math.min(from + ms, at + part);
      }
    }
    from += ms;
  }
  return rows;
};

const Waterfall = ({call}) => {
  const rows = spans(call);
  const total = Math.max(call.stages_ms.total || 0, ...rows.map((row) => row.from + row.ms), 1e-3);
  const target = known(call.target_ms) && call.target_ms < total ? call.target_ms : null;
  return html`<div class="waterfall" role="list" aria-label="where the time went">
    ${rows.map((row, index) => html`<div key=${index} role="listitem" class=${`span depth${row.depth}`}>
      <span class="label">${readable(row.name)}</span>
      <span class="track">${known(target) ? html`<i class="target" style=${{left: `${100 * target / total}%`}}></i>` : ""}<i
        class=${`fill-${row.depth ? "tier1" : "accent"}`} style=${{left: `min(${100 * row.from / total}%, calc(100% - 2px))`,
          width: `max(2px, ${100 * Math.min(row.ms, total - row.from) / total}%)`}}></i></span>
      <span class="number">${duration(row.ms)}</span>
    </div>`)}
  </div>`;
};

const Facts = ({facts}) => html`<dl>${facts.filter(([, value]) => known(value) && value !== "").map(([name, value]) => html`
  <div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

const Call = ({call}) => {
  const row = store.data.calls.find((each) => each.id === call.request_id) || {};
  const shown = {...call, target_ms: call.target_ms ?? row.target_ms};
  const {used} = call;
  const cause = (call.promise && call.promise.cause) || row.cause;
  return html`
    <${Waterfall} call=${shown}/>
    <p class="line"><b>${durationText(call.stages_ms.total)}</b> total
      <span class="soft"> · </span>${cause ? readable(cause) : "no cause known"}
      <span class="soft"> · </span>${!used ? "device not reported"
        : used.device_ms ? `${durationText(used.device_ms)} of ${used.device_class || "a device"}` : `${durationText(used.cpu_ms)} of a processor`}
      <span class="soft"> · </span>${money(call.cost) || (call.cost ? "no price" : "no cost")}</p>
    ${call.trace_url ? html`<p><a class="link" href=${safe(call.trace_url)} target="_blank" rel="noopener noreferrer">the whole trace ↗</a></p>` : ""}
    <${Facts} facts=${[
      ["what became of it", `${readable(call.reason)}${call.status ? `, status ${call.status}` : ""}`],
      ["why", call.cause],
      ["tenant", call.tenant ? html`<button type="button" class="name" onClick=${() => open("tenant", call.tenant)}>${call.tenant}</button>` : null],
      ["tier", call.tier], ["target", known(shown.target_ms) ? duration(shown.target_ms) : null],
      ["asked for", call.target], ["route", call.route], ["pool", call.pool],
      ["before it in the queue", call.queue ? whole(call.queue.ahead_at_arrival) : null],
      ["server", call.endpoint], ["tried in vain", (call.tried || []).join(", ")],
      ["went on from", (call.spilled || []).map((each) => `${each.pool} (${readable(each.reason)})`).join(", ")],
      ["left at its end", known(call.budget_ms && call.budget_ms.end) ? duration(Math.abs(call.budget_ms.end)) : null],
      ["bytes in, out", `${grouped.format(call.bytes_in)}, ${grouped.format(call.bytes_out)}`],
      ["tokens in, out", used && used.tokens_in + used.tokens_out ? `${grouped.format(used.tokens_in)}, ${grouped.format(used.tokens_out)}` : null],
      ["ended", new Date(call.ended_at * 1000).toLocaleString()],
      ["request", html`<code>${call.request_id}</code>`], ["trace", html`<code>${call.trace_id}</code>`],
    ]}/>`;
};
// A link that an operator configured leads to a web page, or nowhere.
const safe = (address) => /^https?:\/\//.test(address) ? address : undefined;

const UNITS = {requests: "", bytes: " B", compute_us: " µs", device_seconds: " s", cpu_seconds: " s"};
const unit = ({counts}) => UNITS[counts] ?? ` ${readable(counts)}`;
const LIMITS = [
  {key: "limit", label: "limit", value: (row) => row.name, text: (row) => row.name, cell: (row) => row.name},
  {key: "left", label: "left", number: true, value: (row) => row.limit ? row.left / row.limit : 0,
    cell: (row) => html`<span class="cell"><${Bar} share=${row.limit ? row.left / row.limit : 0} ink=${row.left ? "accent" : "bad"}/><span>${
      amount(row.left)}<span class="soft"> / ${amount(row.limit)}${unit(row)}</span></span></span>`},
  {key: "rate", label: "grows by", number: true, wide: "w0", value: (row) => row.per_s ?? null, cell: (row) => known(row.per_s)
    ? html`${amount(row.per_s)}<span class="soft"> per s</span>` : html`<span class="soft">${row.period ? `per ${row.period}` : "at once"}</span>`},
  {key: "wait", label: "more in", number: true, value: (row) => row.full_in_s, cell: (row) => row.full_in_s ? duration(row.full_in_s * 1000) : dash},
];

// What a tenant has used since midnight, UTC.
const usedText = (today) => [
  today.device_ms ? `${durationText(today.device_ms)} of devices` : "", today.cpu_ms ? `${durationText(today.cpu_ms)} of processors` : "",
  today.tokens_in + today.tokens_out ? `${grouped.format(today.tokens_in + today.tokens_out)} tokens` : "",
].filter(Boolean).join(", ") || "nothing";

const Tenant = ({tenant}) => {
  const asked = chosen.open.of || "";
  const names = store.data.targets.filter((row) => row.kind).map((row) => `${row.kind}:${row.name}`);
  const fixed = [...tenant.models.map((each) => `model:${each}`), ...tenant.services.map((each) => `service:${each}`)].filter((each) => !each.includes("*"));
  const options = [...new Set([...names, ...fixed])].sort();
  const row = store.data.tenants.find((each) => each.tenant === tenant.tenant);
  return html`
    <${Facts} facts=${[["tier", tenant.tier], ["weight in its tier", amount(tenant.weight)],
      ["may use", [...tenant.models.map((each) => `model ${each}`), ...tenant.services.map((each) => `service ${each}`)].join(", ") || "nothing"],
      ["scopes", tenant.scopes.join(", ")],
      ["last minute", row ? html`${decimal(row.rate)} calls/s, ${whole(bad(row))} late or missed, ${whole(row.refused)} refused` : "no call"],
      ["used today", usedText(tenant.today)], ["cost today", money(tenant.today.cost) || html`<span class="soft">the documents have no price</span>`]]}/>
    <${Table} id="limits" title="Limits" columns=${LIMITS} rows=${tenant.limits} rowKey=${(row) => row.name} empty="none"/>
    <h3><label for="explain">What would apply to a call of</label></h3>
    <select id="explain" value=${asked} onChange=${(event) => choose({open: {...chosen.open, of: event.target.value}})}>
      <option value="">choose a model or service</option>
      ${options.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
    <ol class="steps">${tenant.steps.map((each, index) => html`<li key=${index}><span class="soft">${each.stage}</span><span>${each.text}${
      each.refused ? html` <span class="ink-bad">refused: ${readable(each.refused)}</span>` : ""}</span></li>`)}</ol>`;
};

const Details = () => {
  const {open: wanted} = chosen;
  const found = store.details;
  if (!wanted) return "";
  const title = wanted.kind === "call" ? "Call" : wanted.id;
  const here = found && found.data !== undefined && found.kind === wanted.kind && found.id === wanted.id;
  return html`<aside aria-labelledby="details-title" id="details" tabindex="-1">
    <header><h2 id="details-title">${title}</h2><button type="button" class="quiet" id="details-close" onClick=${close}>close <kbd>Esc</kbd></button></header>
    ${here && found.data ? wanted.kind === "call" ? html`<${Call} call=${found.data}/>` : html`<${Tenant} tenant=${found.data}/>`
      : html`<p class="soft">${!found || found.state === "loading" ? "loading" : found.state === "failed" ? found.problem
        : wanted.kind === "call" ? "the gateway does not keep this call any more" : "no tenant of the documents has this name"}</p>`}
  </aside>`;
};
