// Numbers and times as text. A value that is not known is null and is shown as a dash.

const {html, render, useEffect, useLayoutEffect, useRef} = htmPreact;

const dash = html`<span class="soft">–</span>`;
const known = (value) => value !== null && value !== undefined;
const grouped = new Intl.NumberFormat("en", {maximumFractionDigits: 0});

const whole = (value) => known(value) ? grouped.format(value) : dash;

const decimal = (value) => {
  if (!known(value)) return dash;
  if (value === 0) return "0";
  if (value >= 100) return grouped.format(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
};

// A number that stands alone, not in a column.
const brief = (value) => known(value) ? value === 0 || value >= 100 ? grouped.format(value) : value.toFixed(1) : dash;

// An amount in its unit; a part of one has three digits that count, down to 1e-9.
const amount = (value) => {
  if (Number.isInteger(value) || value >= 100) return grouped.format(value);
  return value.toFixed(Math.min(9, Math.max(2, 2 - Math.floor(Math.log10(Math.abs(value))))));
};
// {currency: amount} as text; nothing where the documents have no price.
const money = (cost) => Object.entries(cost || {}).map(([currency, value]) => `${amount(Number(value))} ${currency}`).join(", ");

// A number and its unit, which takes the same room whatever it is, so that the digits of a column stand in line.
const withUnit = (number, unit) => html`<span>${number}<span class="unit">${unit}</span></span>`;

const durationParts = (ms) => {
  if (ms === 0) return ["0", "ms"];
  if (ms < 0.995) return [ms.toFixed(2), "ms"];
  if (ms < 9.95) return [ms.toFixed(1), "ms"];
  if (ms < 999.5) return [ms.toFixed(0), "ms"];
  if (ms < 99950) return [(ms / 1000).toFixed(ms < 9995 ? 2 : 1), "s"];
  if (ms < 6e6) return [(ms / 6e4).toFixed(0), "min"];
  if (ms < 1.728e8) return [(ms / 36e5).toFixed(0), "h"];
  return [(ms / 8.64e7).toFixed(0), "d"];
};
const duration = (ms) => known(ms) ? withUnit(...durationParts(ms)) : dash;
const durationText = (ms) => known(ms) ? durationParts(ms).join(" ") : "–";

// Cut, not rounded: 100 % is said only of all.
const percentText = (share, digits) => {
  const power = 10 ** digits;
  return (Math.floor(share * 100 * power + 1e-9) / power).toFixed(digits);
};
const percent = (share, digits = 2) => known(share) ? withUnit(percentText(share, digits), "%") : dash;

const clock = (epochS) => new Date(epochS * 1000).toTimeString().slice(0, 8);

const attained = (row) => {
  const judged = row.met + row.late + row.missed;
  return judged ? row.met / judged : null;
};

const readable = (word) => String(word || "").replaceAll("_", " ");
