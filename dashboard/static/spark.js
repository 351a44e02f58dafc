// Small lines of SVG: beside figures, and in place of charts where uPlot is not installed.
import {svg} from "./dom.js";

const WIDTH = 200;

/** A line through values (null: none), from the least to the greatest; `label` says in words what is shown. */
export function spark(values, label, height = 40) {
  const viewBox = `0 0 ${WIDTH} ${height}`;
  const frame = {class: "spark", viewBox, preserveAspectRatio: "none", role: "img", "aria-label": label};
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return svg("svg", frame);
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const x = (index) => ((index / (values.length - 1)) * WIDTH).toFixed(1);
  const y = (value) => (height - 2 - ((value - low) / span) * (height - 4)).toFixed(1);
  const points = values.map((value, index) => (value === null ? null : `${x(index)} ${y(value)}`));
  const line = `M${points.filter(Boolean).join("L")}`;
  const first = points.findIndex(Boolean);
  const last = points.findLastIndex(Boolean);
  const area = `${line}L${x(last)} ${height}L${x(first)} ${height}Z`;
  return svg("svg", frame, svg("path", {d: area, class: "area"}), svg("path", {d: line}));
}
