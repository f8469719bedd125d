// Tables that sort, filter, and keep their order while somebody points at them.

const orders = {}; // table -> the keys of its rows in the order that is shown, while it is held
const held = {};

const compare = (a, b) => {
  if (!known(a)) return known(b) ? 1 : 0;
  if (!known(b)) return -1;
  return typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : a - b;
};

const sorted = (id, columns, rows) => {
  const by = chosen.sort[id] || "";
  const column = columns.find((each) => each.key === by.replace("-", ""));
  if (!column) return rows;
  const sign = by.startsWith("-") ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [left, right] = [column.value(a), column.value(b)];
    return known(left) && known(right) ? sign * compare(left, right) : compare(left, right);
  });
};

const arranged = (id, columns, rows, key) => {
  const text = chosen.q.toLowerCase();
  const shown = sorted(id, columns, rows.filter((row) => !text || columns.some((column) =>
    column.text && String(column.text(row)).toLowerCase().includes(text))));
  if (held[id] && orders[id]) {
    const place = new Map(orders[id].map((each, index) => [each, index]));
    shown.sort((a, b) => (place.get(key(a)) ?? 1e9) - (place.get(key(b)) ?? 1e9));
  }
  orders[id] = shown.map(key);
  return shown;
};

const turn = (id, column) => {
  const first = column.number ? `-${column.key}` : column.key;
  const second = column.number ? column.key : `-${column.key}`;
  const now = chosen.sort[id];
  held[id] = false;
  choose({sort: {...chosen.sort, [id]: now === first ? second : now === second ? "" : first}});
};

const direction = (id, column) => {
  const by = chosen.sort[id];
  return by === column.key ? "ascending" : by === `-${column.key}` ? "descending" : undefined;
};
const ARROWS = {ascending: "↑", descending: "↓"};

// columns: {key, label, value(row) to sort by, cell(row), text(row) that is searched, number, wide: the room from which
// the column is shown, title}. act(row): what Enter and a click do.
const Table = ({id, title, note, columns, rows, more, rowKey, act, empty}) => {
  const shown = arranged(id, columns, rows, rowKey);
  const hidden = rows.length - shown.length;
  const hold = (value) => () => { held[id] = value; };
  const counts = [more ? `${rows.length} of ${rows.length + more}` : "", hidden ? `${hidden} filtered out` : "", note || ""];
  return html`<section class=${`area-${id}`} aria-labelledby=${`h-${id}`}>
    <h2 id=${`h-${id}`}>${title} <span class="soft">${counts.filter(Boolean).join(" · ")}</span></h2>
    <table aria-labelledby=${`h-${id}`}>
      <thead><tr>${columns.map((column) => html`
        <th key=${column.key} scope="col" class=${classes(column)} aria-sort=${direction(id, column)}>
          <button type="button" onClick=${() => turn(id, column)} title=${column.title}>${column.label}<span
            class="arrow" aria-hidden="true">${ARROWS[direction(id, column)] || ""}</span></button></th>`)}</tr></thead>
      <tbody onMouseEnter=${hold(true)} onMouseLeave=${hold(false)}>
        ${shown.map((row) => html`<tr key=${rowKey(row)} data-key=${`${id}/${rowKey(row)}`} tabindex="-1"
            class=${act ? "acts" : ""} onClick=${act ? (event) => act(row, event) : undefined}
            onFocus=${(event) => { store.current = event.currentTarget.dataset.key; }}>
          ${columns.map((column, index) => index
            ? html`<td key=${column.key} class=${classes(column)}>${column.cell(row)}</td>`
            : html`<th key=${column.key} scope="row" class=${classes(column)}>${act
              ? html`<button type="button" class="name">${column.cell(row)}</button>` : column.cell(row)}</th>`)}
        </tr>`)}
        ${shown.length ? "" : html`<tr key="none" class="none"><td colspan=${columns.length}>${
          hidden ? "nothing here has this text" : empty}</td></tr>`}
      </tbody>
    </table>
  </section>`;
};
const classes = (column) => [column.number ? "number" : "", column.wide || "", column.grow ? "grow" : ""].join(" ").trim();

// The next row down or up from the one that has the focus, over all tables.
const step = (by) => {
  const rows = [...document.querySelectorAll("main tr[data-key]")];
  const at = rows.findIndex((row) => row.dataset.key === store.current);
  const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by))];
  if (next) {
    next.focus();
    next.scrollIntoView({block: "nearest"});
  }
};

// A row that moved to another place has lost the focus.
const refocus = () => {
  const key = store.restore || (document.activeElement === document.body ? store.current : null);
  if (!key || chosen.open || store.help) return;
  store.restore = null;
  const row = [...document.querySelectorAll("main tr[data-key]")].find((each) => each.dataset.key === key);
  if (row) row.focus({preventScroll: true});
};
