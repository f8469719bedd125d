// Draws each chart of the page from the JSON inside it.
for (const place of document.querySelectorAll(".chart")) {
  const {unit, bin_s: bin, lines, spans, logarithmic, top} = JSON.parse(place.firstChild.textContent);
  const colour = (name) => getComputedStyle(place).getPropertyValue(`--${name}`).trim();
  const bins = Math.max(...lines.map((line) => line.values.length));
  const end = Math.max(bin, ...spans.map((span) => span.end_s), lines.some((line) => line.values.length > 1) ? bins * bin : 0);
  const values = ({values: [first, ...more]}) => more.length ? [first, ...more, ...Array(bins - 1 - more.length).fill(null)] : Array(bins).fill(first);
  const axis = {stroke: colour("soft"), font: "11.5px system-ui, sans-serif", grid: {stroke: colour("grid"), width: 1}, ticks: {show: false}};
  const phases = (plot) => {
    const {ctx, bbox} = plot;
    ctx.save();
    spans.forEach(({label, start_s: start, end_s: ends, style}, number) => {
      const [left, right] = [start, ends].map((second) => plot.valToPos(second, "x", true));
      if (style) {
        ctx.fillStyle = colour(style);
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
      }
      ctx.fillStyle = colour("soft");
      if (number) ctx.fillRect(left, bbox.top, devicePixelRatio, bbox.height);
      ctx.font = `${11.5 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.fillText(label, left + 4 * devicePixelRatio, bbox.top - 5 * devicePixelRatio, Math.max(0, right - left - 6));
    });
    ctx.restore();
  };
  const plot = new uPlot({
    width: place.clientWidth, height: 250, padding: [22, 14, 0, 0],
    scales: {
      x: {time: false, range: [0, end]},
      y: logarithmic ? {distr: 3} : {range: (_, low, high) => [0, top === null ? Math.max(high, 1e-9) * 1.05 : top]},
    },
    axes: [
      {...axis, values: (_, ticks) => ticks.map((second) => `${second} s`)},
      {...axis, size: 64, values: (_, ticks) => ticks.map((value) => value === null ? "" : `${value.toLocaleString("en", {maximumSignificantDigits: 4})} ${unit}`)},
    ],
    series: [{label: "s"}, ...lines.map(({label, colour: stroke, width, dash}) => ({
      label, stroke, width, dash, points: {show: (_, index, low, high) => low === high},
    }))],
    hooks: {drawClear: [phases]},
  }, [Array.from({length: bins}, (_, index) => (index + 0.5) * bin), ...lines.map(values)], place);
  addEventListener("resize", () => plot.setSize({width: place.clientWidth, height: 250}));
}
