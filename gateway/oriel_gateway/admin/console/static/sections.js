// The first screen: tiers, pools, models and services, tenants, and the latest calls that were not served in time.

const INKS = ["tier0", "tier1", "tier2", "tier3"];
const tierInk = (name) => {
  const at = store.data.tiers.findIndex((tier) => tier.tier === name);
  return INKS[Math.min(at < 0 ? 3 : at, 3)];
};

const Judged = ({share, objective, digits}) => {
  if (!known(share)) return dash;
  const low = share < objective;
  return html`<span class=${low ? "ink-bad" : ""}>${low ? html`<span class="mark" aria-label="below the objective">▾</span>` : ""}${percent(share, digits)}</span>`;
};

const causes = (row) => Object.entries(row.causes || {}).sort((a, b) => b[1] - a[1]);
const Causes = ({row}) => {
  const all = causes(row);
  if (!all.length) return dash;
  const total = all.reduce((sum, [, count]) => sum + count, 0);
  const [text, ...rest] = all.map(([cause, count]) => `${readable(cause)} ${Math.round(100 * count / total)} %`);
  return html`<span class="cell" title=${[text, ...rest].join(", ")}><${Parts} of=${total}
    parts=${all.slice(0, 4).map(([cause, count], index) => [cause, count, INKS[index]])}/><span class="text">${text}</span></span>`;
};

const at = (row, window) => (row.attainment || {})[window];
const burn = (row) => (row.burn || {})["1h"];
// paced: some tier has a time per token.
const TIERS = (paced) => [
  {key: "tier", label: "tier", value: (row) => row.tier, text: (row) => row.tier,
    cell: (row) => html`<i class=${`swatch fill-${tierInk(row.tier)}`} aria-hidden="true"></i>${row.tier}`},
  {key: "target", label: "target", number: true, wide: "w2", value: (row) => row.target_ms,
    cell: (row) => duration(row.target_ms)},
  ...(paced ? [{key: "token", label: "a token", number: true, wide: "w2", title: "the target of the mean time from one token of a stream to the next",
    value: (row) => row.token_ms ?? null, cell: (row) => duration(row.token_ms)}] : []),
  {key: "rate", label: "calls/s", number: true, wide: "w1", value: (row) => row.rate, cell: (row) => decimal(row.rate)},
  {key: "tokens", label: paced ? "tokens/s of ended" : "tokens/s", number: true, wide: paced ? "w5" : "w4", title: "read and written, of the calls that ended in the last minute",
    value: (row) => row.tokens_s ?? null, cell: (row) => known(row.tokens_s) ? decimal(row.tokens_s) : dash},
  {key: "minute", label: "1 min", number: true, wide: "w4", title: "in time, of the calls of the last minute",
    value: attained, cell: (row) => html`<${Judged} share=${attained(row)} objective=${row.objective} digits=${2}/>`},
  ...[["5m", "5 min", "w0"], ["1h", "1 h", ""], ["30d", "30 d", "w1"]].map(([key, label, wide]) => ({
    key, label, number: true, wide, title: `in time, of the calls of the last ${label}`, value: (row) => at(row, key),
    cell: (row) => html`<${Judged} share=${at(row, key)} objective=${row.objective} digits=${2}/>`})),
  {key: "left", label: "budget left", number: true, title: "of the error budget of 30 days", value: (row) => row.budget_left,
    cell: (row) => !known(row.budget_left) ? dash : row.budget_left <= 0 ? html`<span class="ink-bad">spent</span>` : html`<span class="cell"><${Bar} share=${row.budget_left} ink=${
      row.budget_left < 0.1 ? "bad" : row.budget_left < 0.3 ? "warn" : "good"}/>${percent(row.budget_left, 0)}</span>`},
  {key: "burn", label: "burn", number: true, wide: paced ? "w5" : "w1", title: "how fast the budget burns: 1 lasts for 30 days; over the last hour",
    value: burn, cell: (row) => known(burn(row)) ? withUnit(decimal(burn(row)), "×") : dash},
  {key: "waiting", label: "waiting", number: true, value: (row) => row.waiting, cell: (row) => whole(row.waiting)},
  {key: "oldest", label: "oldest", number: true, wide: "w3", title: "how long the oldest of them waits",
    value: (row) => row.oldest_ms, cell: (row) => row.waiting ? duration(row.oldest_ms) : dash},
  {key: "causes", label: paced ? "cause" : "cause of misses", grow: true, wide: "w2", value: (row) => (causes(row)[0] || [null])[0],
    text: (row) => causes(row).map(([cause]) => readable(cause)).join(" "), cell: (row) => html`<${Causes} row=${row}/>`},
];

const waits = (row) => Object.values(row.waiting).reduce((a, b) => a + b, row.parked);
const Waits = ({row, most}) => {
  if (!waits(row)) return html`<span class="soft">0</span>`;
  const parts = Object.entries(row.waiting).map(([tier, count]) => [tier, count, tierInk(tier)]);
  if (row.parked) parts.push(["no server", row.parked, "bad"]);
  const text = parts.map(([name, count]) => `${name} ${grouped.format(count)}`).join(", ");
  return html`<span class="cell"><${Parts} parts=${parts} of=${most}/><span class="text">${text}</span></span>`;
};
const PHASES = {no_address: "no server", starting: "starting", loading: "loading", ready: "ready"};
const Start = ({row}) => {
  if (!row.phase) return dash;
  const rest = known(row.expected_ms) && row.phase !== "ready" ? `, about ${durationText(row.expected_ms)}` : "";
  return html`<span class=${row.phase === "ready" ? "soft" : "ink-warn"}>${PHASES[row.phase] || readable(row.phase)}${rest}</span>`;
};
const Language = ({row}) => {
  if (!row.language) return dash;
  const text = Object.entries(row.language.calls).map(([tier, [run, wait, paused]]) =>
    `${tier} ${run}/${wait}/${paused}`).join(", ");
  const all = known(row.language.tokens_s) ? `${decimal(row.language.tokens_s)} tokens/s: ${text}` : text;
  return html`<span class="cell" title=${all}><${Bar} share=${row.language.cache} ink="accent"/><span class="text">${all}</span></span>`;
};
const replicas = (row) => !known(row.wanted) ? dash : row.wanted === row.replicas ? whole(row.replicas)
  : html`<span>${row.replicas}<span class="soft"> → </span>${row.wanted}</span>`;
// decoding: some pool has language models.
const POOLS = (most, decoding) => [
  {key: "pool", label: "pool", value: (row) => row.pool, text: (row) => row.pool,
    cell: (row) => html`${row.pool}${row.left ? html` <span class="soft">leaving</span>` : ""}`},
  {key: "permits", label: "permits", number: true, title: "out, of those there are", value: (row) => row.inflight / row.permits,
    cell: (row) => html`<span class="cell"><${Bar} share=${row.inflight / row.permits} ink=${
      row.inflight >= row.permits ? "warn" : "accent"}/><span class="of">${row.inflight}<span class="soft"> / ${row.permits}</span></span></span>`},
  {key: "waiting", label: "waiting", grow: true, value: waits, number: false, cell: (row) => html`<${Waits} row=${row} most=${most}/>`},
  {key: "oldest", label: "oldest", number: true, wide: "w1", value: (row) => row.oldest_ms,
    cell: (row) => waits(row) ? duration(row.oldest_ms) : dash},
  {key: "endpoints", label: "servers", value: (row) => row.endpoints.ready || 0, text: (row) => Object.keys(row.endpoints).join(" "),
    cell: (row) => html`<${Dots} endpoints=${row.endpoints}/>`},
  {key: "language", label: "decoding", wide: decoding ? "w2" : "w4", grow: decoding, title: "of one server's language models: cache in use, tokens made, calls that run / wait / are paused",
    value: (row) => row.language ? row.language.cache : null, cell: (row) => html`<${Language} row=${row}/>`},
  {key: "start", label: "cold start", wide: decoding ? "w3" : "w2", value: (row) => row.phase || null, text: (row) => PHASES[row.phase] || "",
    cell: (row) => html`<${Start} row=${row}/>`},
  {key: "replicas", label: "replicas", number: true, wide: decoding ? "w3" : "w1", title: "how many there are, and how many are wanted",
    value: (row) => row.wanted ?? null, cell: replicas},
];

const bad = (row) => row.late + row.missed;
const Bad = ({row}) => bad(row) ? html`<span class="ink-bad">${whole(bad(row))}</span>` : html`<span class="soft">0</span>`;
const PROVIDERS = {Tensorrt: "TensorRT", NvTensorRTRTX: "TensorRT RTX"};
const TARGETS = [
  {key: "name", label: "model or service", value: (row) => row.name, text: (row) => `${row.kind} ${row.name} ${row.pool}`,
    cell: (row) => html`${row.name}${row.kind === "service" ? html` <span class="soft">service</span>` : ""}`},
  {key: "rate", label: "calls/s", number: true, value: (row) => row.rate, cell: (row) => decimal(row.rate)},
  {key: "p50", label: "p50", number: true, wide: "w1", value: (row) => row.p50_ms, cell: (row) => duration(row.p50_ms)},
  {key: "p99", label: "p99", number: true, value: (row) => row.p99_ms, cell: (row) => duration(row.p99_ms)},
  {key: "bad", label: "misses", number: true, wide: "w1", title: "late or missed in the last minute", value: bad, cell: (row) => html`<${Bad} row=${row}/>`},
  {key: "rows", label: "rows", number: true, title: "mean rows of a batch", value: (row) => row.rows, cell: (row) => decimal(row.rows)},
  {key: "provider", label: "provider", wide: "w2", value: (row) => row.provider || null, text: (row) => row.provider, cell: (row) => PROVIDERS[row.provider] || row.provider || dash},
  {key: "version", label: "version", number: true, wide: "w1", value: (row) => row.version || null, text: (row) => row.version, cell: (row) => row.version || dash},
];

// Only where a model asks for a compiled artefact.
const Artefact = ({state}) => !state ? dash : html`<span class=${state === "serving" ? "soft" : state === "refused" ? "ink-bad" : "ink-warn"}>${state}</span>`;
const ARTEFACT = {key: "artefact", label: "artefact", wide: "w2", title: "the compiled artefact that the model asks for; until it serves, the model itself does",
  value: (row) => row.artefact || null, text: (row) => row.artefact || "", cell: (row) => html`<${Artefact} state=${row.artefact}/>`};
// Only where answers are compared: with those of a shadow, or of the other side of a canary.
const AGREES = {key: "agrees", label: "agrees", number: true, wide: "w1", title: "rows with the same class as in the pool that is compared, the lowest share",
  value: (row) => row.agrees ?? null, cell: (row) => percent(row.agrees, 1)};

const TENANTS = [
  {key: "tenant", label: "tenant", value: (row) => row.tenant, text: (row) => `${row.tenant} ${row.tier}`, cell: (row) => row.tenant},
  {key: "tier", label: "tier", wide: "w1", value: (row) => row.tier, cell: (row) => row.tier ? html`<i class=${`swatch fill-${tierInk(row.tier)}`} aria-hidden="true"></i>${row.tier}` : dash},
  {key: "bad", label: "misses", number: true, title: "late or missed in the last minute", value: bad, cell: (row) => html`<${Bad} row=${row}/>`},
  {key: "share", label: "in time", number: true, value: attained, cell: (row) => percent(attained(row), 1)},
  {key: "used", label: "use", number: true, title: "permits that the tenant's calls held, on average of the last minute", value: (row) => row.used, cell: (row) => decimal(row.used)},
  {key: "refused", label: "refused", number: true, value: (row) => row.refused, cell: (row) => row.refused ? whole(row.refused) : html`<span class="soft">0</span>`},
  {key: "rate", label: "calls/s", number: true, wide: "w1", value: (row) => row.rate, cell: (row) => decimal(row.rate)},
];

const excess = (row) => row.over_ms ?? (known(row.target_ms) && row.result === "late" ? row.took_ms - row.target_ms : null);
const CALLS = [
  {key: "at", label: "time", value: (row) => row.at, cell: (row) => clock(row.at)},
  {key: "result", label: "result", value: (row) => row.result, text: (row) => row.result, cell: (row) => html`<${Result} row=${row}/>`},
  {key: "reason", label: "reason", value: (row) => row.reason, text: (row) => readable(row.reason),
    cell: (row) => row.result === "late" ? dash : readable(row.reason)},
  {key: "cause", label: "cause", wide: "w1", value: (row) => row.cause || null, text: (row) => readable(row.cause), cell: (row) => readable(row.cause) || dash},
  {key: "tenant", label: "tenant", value: (row) => row.tenant, text: (row) => `${row.tenant} ${row.tier}`, cell: (row) => row.tenant || dash},
  {key: "tier", label: "tier", wide: "w2", value: (row) => row.tier, cell: (row) => row.tier || dash},
  {key: "target", label: "of", wide: "w2", value: (row) => row.target, text: (row) => row.target, cell: (row) => row.target.replace(/^(model|service):/, "") || dash},
  {key: "took", label: "took", number: true, value: (row) => row.took_ms, cell: (row) => duration(row.took_ms)},
  {key: "excess", label: "over target", number: true, wide: "w1", value: excess, cell: (row) => known(excess(row)) ? duration(excess(row)) : dash},
  {key: "id", label: "request", wide: "w3", grow: true, value: (row) => row.id, text: (row) => row.id, cell: (row) => html`<code>${row.id}</code>`},
];

const Main = ({data}) => {
  const rates = data.rates;
  const total = rates ? rates.met + rates.late + rates.missed + rates.excused : null;
  const waiting = store.history.waiting.at(-1);
  const most = Math.max(1, ...data.pools.map(waits));
  const minute = data.covers_s >= 60 ? "last minute" : `last ${data.covers_s} s`;
  return html`<main>
    <${Table} id="tiers" title="Tiers" columns=${TIERS(data.tiers.some((row) => row.token_ms))} rows=${data.tiers} more=${data.more.tiers} rowKey=${(row) => row.tier}
      empty="the documents have no tier"/>
    <${Chart} id="rate" title="Calls per second" theme=${chosen.theme} value=${html`<b>${brief(total)}</b>
        ${rates ? html`<span class=${rates.late + rates.missed ? "ink-bad" : "soft"}>${brief(rates.late + rates.missed)} late or missed</span>` : ""}`}
      series=${[{key: "met", label: "in time", ink: "accent"}, {key: "bad", label: "late or missed", ink: "bad", fill: 0.25}]}/>
    <${Table} id="pools" title="Pools" columns=${POOLS(most, data.pools.some((row) => row.language))} rows=${data.pools} more=${data.more.pools} rowKey=${(row) => row.pool}
      empty="the documents have no pool"/>
    <${Chart} id="waits" title="Waiting" theme=${chosen.theme} value=${html`<b>${whole(waiting)}</b>
        <span class="soft">calls</span>`} series=${[{key: "waiting", label: "calls that wait", ink: "tier1", fill: 0.15}]}/>
    <${Table} id="targets" title="Models and services" note=${minute} rows=${data.targets}
      columns=${[...TARGETS, ...(data.targets.some((row) => row.artefact) ? [ARTEFACT] : []), ...(data.targets.some((row) => known(row.agrees)) ? [AGREES] : [])]} more=${data.more.targets}
      rowKey=${(row) => `${row.kind}:${row.name}`} empty="no call in the last minute"/>
    <${Table} id="tenants" title="Tenants" note=${minute} columns=${TENANTS} rows=${data.tenants} more=${data.more.tenants}
      rowKey=${(row) => row.tenant} act=${(row) => open("tenant", row.tenant)} empty="no call in the last minute"/>
    <${Table} id="calls" title="Latest misses and refusals" columns=${CALLS} rows=${data.calls} more=${data.more.calls}
      rowKey=${(row) => `${row.id} ${row.trace}`} act=${(row) => open("call", `${row.id} ${row.trace}`)} empty=${data.tenants.length ? "none: every call was served in time" : "no call in the last minute"}/>
  </main>`;
};
