// The two charts, and the small marks inside tables.

// The charts reach back to where the page began, at least a minute and at most five.
const LEAST_S = 60;
const SPAN_S = 300;
const latest = () => store.data ? store.data.at : Date.now() / 1000;
const span = () => Math.min(SPAN_S, Math.max(LEAST_S, latest() - (store.history.at[0] ?? latest())));
const steps = () => {
  const each = span() > 150 ? 60 : span() > 75 ? 30 : 15;
  return Array.from({length: Math.floor(span() / each)}, (_, index) => each * (index + 1)).filter((back) => back < span() * 0.97).reverse();
};
const ago = (seconds) => seconds % 60 ? `${seconds} s` : `${seconds / 60} min`;
const colours = (element, names) => names.map((name) => {
  const probe = document.createElement("i");
  probe.className = `ink-${name}`;
  element.append(probe);
  const {color} = getComputedStyle(probe);
  probe.remove();
  return color;
});

const faded = (colour, share) => colour.replace(/^rgb\((.*)\)$/, (_, numbers) => `rgba(${numbers}, ${share})`);

// series: [{label, key, ink, fill}] of the history.
const Chart = ({id, title, value, series, theme}) => {
  const place = useRef(null);
  const made = useRef(null);
  useEffect(() => {
    const element = place.current;
    const draw = () => {
      if (made.current) made.current.destroy();
      const [line, soft, ...inks] = colours(element, ["line", "soft", ...series.map((each) => each.ink)]);
      const axis = {stroke: soft, font: "11px system-ui, sans-serif", ticks: {show: false}};
      made.current = new uPlot({
        width: element.clientWidth, height: element.clientHeight, legend: {show: false}, padding: [6, 4, 0, 0],
        cursor: {y: false, points: {show: false}, drag: {x: false, y: false}},
        scales: {
          x: {range: () => [latest() - span(), latest()]},
          y: {range: (_, low, high) => [0, Math.max(4, (high || 0) * 1.15)]},
        },
        axes: [
          {...axis, grid: {show: false}, size: 20, splits: (_, axisIndex, low, high) => steps().map((back) => high - back),
            values: (_, ticks) => ticks.map((each) => ago(Math.round(latest() - each)))},
          {...axis, grid: {stroke: line, width: 1}, size: 38, space: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6]},
        ],
        series: [{}, ...series.map((each, index) => ({
          label: each.label, stroke: inks[index], width: 1.25, points: {show: false},
          fill: faded(inks[index], each.fill || 0.08),
        }))],
      }, [store.history.at, ...series.map((each) => store.history[each.key])], element);
    };
    draw();
    let width = element.clientWidth;
    const watch = new ResizeObserver(() => {
      if (element.clientWidth !== width) { width = element.clientWidth; draw(); }
    });
    watch.observe(element);
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", draw);
    return () => {
      watch.disconnect();
      system.removeEventListener("change", draw);
      made.current.destroy();
      made.current = null;
    };
  }, [theme]);
  useLayoutEffect(() => {
    if (made.current) made.current.setData([store.history.at, ...series.map((each) => store.history[each.key])]);
  });
  return html`<section class=${`chart area-${id}`} aria-labelledby=${`h-${id}`}>
    <h2 id=${`h-${id}`}>${title}</h2>
    <p class="figures">${value}</p>
    <div class="canvas" ref=${place} aria-hidden="true"></div>
  </section>`;
};

// The number that a bar shows stands beside it, so that it is hidden from those who do not see it.
const Bar = ({share, ink = "accent"}) => html`<span class="bar" aria-hidden="true"><i
  class=${`fill-${ink}`} style=${{width: `${Math.min(100, Math.max(0, share * 100))}%`}}></i></span>`;

// parts: [[name, number, ink]]; of: what the whole width is.
const Parts = ({parts, of}) => html`<span class="bar parts" aria-hidden="true">${parts.map(
  ([name, number, ink]) => html`<i key=${name} class=${`fill-${ink}`}
    style=${{width: `${of ? Math.max(1.5, 100 * number / of) : 0}%`}}></i>`)}</span>`;

// A shape and a colour for each state of an endpoint.
const SHAPES = {
  ready: html`<circle cx="5" cy="5" r="3.6"/>`,
  unknown: html`<circle cx="5" cy="5" r="3" class="hollow"/>`,
  not_ready: html`<g><circle cx="5" cy="5" r="3" class="hollow"/><path d="M5 2a3 3 0 0 0 0 6z"/></g>`,
  unreachable: html`<path d="M2 2l6 6M8 2l-6 6" class="hollow"/>`,
  ejected: html`<path d="M5 1.2l4 7.4h-8z"/>`,
};
const STATES = {ready: "ready", unknown: "not probed", not_ready: "not ready", unreachable: "unreachable", ejected: "ejected"};
const MOST_DOTS = 16;
const Dots = ({endpoints}) => {
  const all = Object.entries(endpoints);
  if (!all.length) return html`<span class="soft">none</span>`;
  const label = all.map(([state, count]) => `${count} ${STATES[state] || readable(state)}`).join(", ");
  const states = all.flatMap(([state, count]) => Array(Math.min(count, MOST_DOTS)).fill(state)).slice(-MOST_DOTS);
  const total = all.reduce((sum, [, count]) => sum + count, 0);
  return html`<span class="dots" role="img" aria-label=${label} title=${label}>${states.map((state, index) => html`
    <svg key=${index} viewBox="0 0 10 10" width="10" height="10" class=${`dot dot-${state}`}>${SHAPES[state]}</svg>`)}${
    total > states.length ? html`<span class="soft">+${total - states.length}</span>` : ""}</span>`;
};

const MARKS = {late: "◔", missed: "✕", refused: "⊘"};
const Result = ({row}) => {
  const kind = row.result === "late" ? "late" : known(row.status) && row.reason !== "answered" && row.refused ? "refused" : row.result;
  return html`<span class=${`result ink-${kind === "late" ? "warn" : "bad"}`}><span aria-hidden="true">${MARKS[kind] || "·"}</span> ${kind}</span>`;
};
