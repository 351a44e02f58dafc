// Small SVG drawings: histograms with three marks on the axis, and lines beside figures, or in place of charts if uPlot is not
// installed.
import {h, svg} from "./dom.js";
import {count, figure} from "./format.js";

const HEIGHT = 90;
const LENGTH = 200; // of a line
const sum = (values) => values.reduce((total, value) => total + value, 0);
const isAlike = (least, greatest, zeros) => !zeros && least !== undefined && least !== null && least === greatest;
const BAR = 10; // of width, stretched to the card

/**
 * Bars of a histogram {bounds, counts, zeros}; `title` names it, `format` writes a value. Buckets lie side by side in equal
 * widths, whatever their scale.
 */
export function histogram({bounds, counts, zeros = 0, least, greatest}, title, format = figure) {
  if (!counts.length) return h("p.empty", zeros ? `All ${count(zeros)} are 0.` : "There are no values yet.");
  const known = counts.filter(Boolean);
  if (isAlike(least, greatest, zeros)) return h("div.histogram", h("p.alike", `All ${count(sum(known))} are ${format(least)}.`));
  const most = Math.max(...counts);
  const range = (at) => `${format(bounds[at])} to ${format(bounds[at + 1])}`;
  const peak = counts.indexOf(most);
  const label = `${title}: ${format(bounds[0])} to ${format(bounds.at(-1))}, most of them (${count(most)}) from ${range(peak)}`;
  const frame = {class: "bars", viewBox: `0 0 ${BAR * counts.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label};
  const bars = counts.map((number, at) => {
    const height = number ? Math.max(1.5, (number / most) * HEIGHT) : 0;
    const bar = svg("rect", {x: at * BAR + 0.5, y: HEIGHT - height, width: BAR - 1, height});
    const column = svg("rect", {x: at * BAR, y: 0, width: BAR, height: HEIGHT, class: "touch"});
    const text = svg("title");
    text.textContent = `${range(at)}: ${count(number)}`;
    column.append(text);
    return [bar, column];
  });
  const marks = [0, Math.floor(counts.length / 2), counts.length].filter((at, place, all) => all.indexOf(at) === place);
  return h("div.histogram", svg("svg", frame, ...bars.flat()), h("div.marks", marks.map((at) => h("span", format(bounds[at])))),
    zeros > 0 && h("p.quiet", `and ${count(zeros)} zeros`));
}

/** A line through values (null is skipped), scaled from the least to the greatest; `label` describes it for screen readers. */
export function spark(values, label, height = 40) {
  const viewBox = `0 0 ${LENGTH} ${height}`;
  const frame = {class: "spark", viewBox, preserveAspectRatio: "none", role: "img", "aria-label": label};
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return svg("svg", frame);
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const x = (index) => ((index / (values.length - 1)) * LENGTH).toFixed(1);
  const y = (value) => (height - 2 - ((value - low) / span) * (height - 4)).toFixed(1);
  const points = values.map((value, index) => (value === null ? null : `${x(index)} ${y(value)}`));
  const line = `M${points.filter(Boolean).join("L")}`;
  const first = points.findIndex(Boolean);
  const last = points.findLastIndex(Boolean);
  const area = `${line}L${x(last)} ${height}L${x(first)} ${height}Z`;
  return svg("svg", frame, svg("path", {d: area, class: "area"}), svg("path", {d: line}));
}
