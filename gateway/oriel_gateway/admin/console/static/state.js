// What the page shows: the latest snapshot, and what the person chose, which stands in the URL's fragment.
// The token is kept here, in memory, and nowhere else.

const needsToken = document.documentElement.dataset.token === "needed";
const HISTORY = 600;
const store = {
  token: null, data: null, received: 0, link: needsToken ? "token" : "connecting", again: 0, problem: "",
  history: {at: [], met: [], bad: [], waiting: []}, details: null, help: false, current: null,
};
const chosen = {q: "", sort: {}, open: null, theme: "", paused: false};

const readFragment = () => {
  const found = new URLSearchParams(location.hash.slice(1));
  chosen.q = found.get("q") || "";
  chosen.theme = ["light", "dark"].includes(found.get("theme")) ? found.get("theme") : "";
  chosen.sort = {};
  for (const [key, value] of found) if (key.startsWith("sort.")) chosen.sort[key.slice(5)] = value;
  chosen.open = ["call", "tenant"].filter((kind) => found.get(kind)).map((kind) => ({kind, id: found.get(kind), of: found.get("of") || ""}))[0] || null;
  document.documentElement.dataset.theme = chosen.theme;
};

const fragment = () => {
  const made = new URLSearchParams();
  if (chosen.q) made.set("q", chosen.q);
  for (const [table, by] of Object.entries(chosen.sort)) if (by) made.set(`sort.${table}`, by);
  if (chosen.open) made.set(chosen.open.kind, chosen.open.id);
  if (chosen.open && chosen.open.of) made.set("of", chosen.open.of);
  if (chosen.theme) made.set("theme", chosen.theme);
  return `#${made}`;
};

// A panel that is opened is a step that the browser's Back undoes; sorting and searching are not.
const choose = (change, step = false) => {
  Object.assign(chosen, change);
  document.documentElement.dataset.theme = chosen.theme;
  if (step) history.pushState(null, "", fragment()); else history.replaceState(null, "", fragment());
  update();
};

const open = (kind, id) => choose({open: {kind, id}}, true);
const close = () => {
  store.details = null;
  store.restore = store.current;
  choose({open: null}, true);
};

const remember = (data) => {
  const {history: past} = store;
  const rates = data.rates || {};
  const waiting = data.pools.reduce((sum, pool) => sum + Object.values(pool.waiting).reduce((a, b) => a + b, pool.parked), 0);
  past.at.push(data.at);
  past.met.push(known(rates.met) ? rates.met : null);
  past.bad.push(known(rates.met) ? rates.late + rates.missed : null);
  past.waiting.push(waiting);
  for (const list of Object.values(past)) if (list.length > HISTORY) list.shift();
};
