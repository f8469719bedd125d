// The connection to the gateway, the keys, and the frame of the page.

let stop = null; // ends the stream that is open
let again = null;

const disconnect = () => {
  clearTimeout(again);
  if (stop) stop.abort();
  stop = null;
};

const connect = async () => {
  disconnect();
  if (chosen.paused || (needsToken && !store.token)) return;
  const mine = stop = new AbortController();
  try {
    const headers = store.token ? {authorization: `Bearer ${store.token}`} : {};
    const answer = await fetch("/console/live", {headers, cache: "no-store", signal: mine.signal});
    if (answer.status === 401) {
      store.token = null;
      store.link = needsToken ? "token" : "refused";
      store.problem = needsToken ? "the gateway does not accept this token" : "open the console on the gateway's own machine, by a loopback address";
      update();
      return;
    }
    if (answer.status === 503) throw new Error("8 viewers are connected already");
    if (!answer.ok) throw new Error(`the gateway answered ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let kept = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) throw new Error("the gateway has stopped");
      const events = (kept + value).split("\n\n");
      kept = events.pop();
      const latest = events.filter((each) => each.startsWith("data: ")).at(-1);
      if (latest) {
        store.data = JSON.parse(latest.slice(6));
        store.received = Date.now();
        store.again = 0;
        store.link = "live";
        store.problem = "";
        remember(store.data);
        update();
      }
    }
  } catch (error) {
    if (mine.signal.aborted) return;
    store.again = Math.min(15, (store.again || 0.5) * 2);
    store.link = "lost";
    store.problem = error instanceof TypeError ? "no connection" : error.message;
    again = setTimeout(connect, store.again * 1000);
    update();
  }
};

const pause = () => {
  choose({paused: !chosen.paused});
  if (chosen.paused) disconnect(); else connect();
};

const dark = () => chosen.theme ? chosen.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const switchTheme = () => choose({theme: dark() ? "light" : "dark"});
const toggleHelp = () => { store.help = !store.help; update(); };

const LINKS = {live: "live", connecting: "connecting", lost: "not connected", refused: "not allowed", token: "token needed"};
const Header = () => {
  const {data} = store;
  const state = chosen.paused ? "paused" : store.link;
  const notes = [store.problem, data && data.behind ? "the event loop is behind" : "", data && data.draining ? "the gateway is stopping" : "",
    ...(data && data.rolled_back || []).map((each) => `canary rolled back: ${each}`)].filter(Boolean);
  const troubles = data && data.troubles || [];
  return html`<header class="top">
    <h1>Oriel</h1>
    <p class=${`link-state is-${state}`} role="status"><span aria-hidden="true">${state === "live" ? "●" : state === "paused" ? "‖" : "○"}</span> ${
      chosen.paused ? "paused" : LINKS[store.link]}${notes.length ? html`<span class="ink-warn"> · ${notes.join(" · ")}</span>` : ""}${
      troubles.length ? html`<span class="ink-bad"> · ${troubles.join(" · ")}</span>` : ""}</p>
    ${data ? html`<p class="soft facts">${data.version !== "unknown" ? html`<span>version ${data.version}</span>` : ""}<span>${
      whole(data.tenants_known)} tenants</span>${data.gateways > 1 ? html`<span>one of ${whole(data.gateways)} gateways: shares of 5 minutes and more, budgets and use are of all, the rest is its own</span>` : ""}<span>event loop ${data.lag_ms < 10 ? "on time" : `${durationText(data.lag_ms)} late`}</span></p>` : ""}
    <div class="tools">
      <label class="search"><span class="hidden">search in all tables</span><input type="search" id="search" placeholder="search  /" value=${chosen.q}
        autocomplete="off" spellcheck="false" onInput=${(event) => choose({q: event.target.value})}/></label>
      <button type="button" class="quiet" onClick=${pause} aria-pressed=${chosen.paused}>${chosen.paused ? "go on" : "pause"} <kbd>p</kbd></button>
      <button type="button" class="quiet" onClick=${switchTheme}>${dark() ? "light" : "dark"}</button>
      <button type="button" class="quiet" onClick=${toggleHelp} aria-expanded=${store.help}>keys <kbd>?</kbd></button>
    </div>
  </header>`;
};

const KEYS = [["/", "search in all tables"], ["j  k", "next row, row before"], ["Enter", "open the row"], ["Esc", "close, or clear the search"],
  ["p", "pause and go on"], ["?", "this list"]];
const Help = () => store.help ? html`<aside aria-label="keys" id="help" tabindex="-1"><header><h2>Keys</h2><button type="button" class="quiet" id="help-close"
  onClick=${toggleHelp}>close <kbd>Esc</kbd></button></header><dl>${KEYS.map(([key, text]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${text}</dd></div>`)}</dl>
  <p class="soft">A click on a column's name sorts by it. What you choose stands in the address, so it can be sent to others; the token does not.</p></aside>` : "";

const submit = (event) => {
  event.preventDefault();
  const field = event.target.elements.token;
  store.token = field.value.trim();
  field.value = "";
  store.link = "connecting";
  store.problem = "";
  update();
  connect();
};
const TokenForm = () => html`<main class="alone"><form onSubmit=${submit}>
  <label for="token">Admin token of this gateway</label>
  <input type="password" id="token" name="token" autocomplete="off" required autofocus/>
  <button type="submit">show</button>
  <p class="soft">It is kept in this page's memory until you close it.</p></form></main>`;

const App = () => html`<${Header}/>
  ${store.data ? html`<div class=${`frame ${chosen.open ? "has-details" : ""} ${store.link === "live" || chosen.paused ? "" : "stale"}`}><${Main} data=${store.data}/><${Details}/></div>`
    : store.link === "token" ? html`<${TokenForm}/>` : html`<main class="alone"><p class="soft">${store.problem || "waiting for the first snapshot"}</p></main>`}
  <${Help}/>`;

const root = document.getElementById("root");
let opened = "";
const update = () => {
  render(html`<${App}/>`, root);
  fill();
  const now = store.help ? "help" : chosen.open ? `${chosen.open.kind} ${chosen.open.id}` : "";
  if (now !== opened) {
    opened = now;
    document.getElementById(store.help ? "help" : "details")?.focus({preventScroll: true});
  }
  refocus();
};

const keys = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input, select, textarea");
  if (event.key === "Escape") {
    if (store.help) toggleHelp();
    else if (chosen.open) close();
    else if (chosen.q) choose({q: ""});
    if (typing) typing.blur();
    return;
  }
  if (typing) return;
  if (event.key === "Enter" && event.target.matches("tr[data-key]")) event.target.click();
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "p") pause();
  else if (event.key === "?") toggleHelp();
  else if (event.key === "/") document.getElementById("search")?.focus();
  else return;
  event.preventDefault();
};

root.replaceChildren();
readFragment();
addEventListener("keydown", keys);
addEventListener("popstate", () => { readFragment(); update(); });
addEventListener("hashchange", () => { readFragment(); update(); });
// A page that nobody sees for a minute costs the gateway nothing.
let unseen = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(unseen);
  if (document.hidden) unseen = setTimeout(disconnect, 60000);
  else if (!stop && store.link !== "token") connect();
});
// A page that is kept for the browser's Back would keep one of the few connections that a browser makes to a server.
addEventListener("pagehide", disconnect);
addEventListener("pageshow", (event) => { if (event.persisted && store.link !== "token") connect(); });
update();
connect();
