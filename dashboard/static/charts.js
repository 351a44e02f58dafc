// Charts of lines over time or steps, by uPlot: nothing else here knows it. Where it is not installed, plain lines.
// Each comes with its figures as a table, for those who cannot see it.
import {fill, h} from "./dom.js";
import {clock, count, figure} from "./format.js";
import {spark} from "./spark.js";
import {colour} from "./theme.js";

const HEIGHT = 190;
const LINES = 6; // colours in the style sheet
const TABLE_ROWS = 60;
const WHOLE = Array.from({length: 12}, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat(); // no half actors

/**
 * A chart: {element, set(x, lines), close()}; lines are [{name, values, low?, high?}], values with null for none. Between low and high,
 * the least and the greatest value of each bucket, lies a band: spikes are seen however coarse the curve is.
 * Options: title, unit, format(value), isTime, sync (charts of one name share their cross-hair), zoom(from, to), top (the axis goes
 * from 0 to this at least).
 */
export function makeChart({title, unit = "", format = figure, isTime = true, sync = "", zoom = null, top = 0}) {
  const plot = h("div.plot");
  const rows = h("div");
  const more = h("details", {toggle: () => more.open && drawTable()}, h("summary", "The figures"), rows);
  const caption = h("figcaption", title, h("span.quiet", unit));
  const element = h("figure.card", caption, plot, more);
  const kind = {format, isTime, sync, zoom, top};
  let drawn = null; // {chart, names}
  let data = {x: [], lines: []};

  const drawTable = () => fill(rows, figuresOf(title, data, format, isTime));
  const draw = () => {
    const {x, lines} = data;
    const isEmpty = !lines.some(({values}) => values.some((value) => value !== null));
    const names = lines.map((line) => `${line.name} ${hasBand(line)}`).join("\n");
    if (isEmpty || !window.uPlot) {
      drop();
      fill(plot, isEmpty ? h("p.empty", "No figures in this range yet.") : plainly(lines));
    } else if (drawn?.names === names) {
      drawn.chart.setData([x, ...columnsOf(lines)]);
    } else {
      drop();
      fill(plot);
      drawn = {names, chart: new window.uPlot(optionsOf(kind, plot, lines), [x, ...columnsOf(lines)], plot)};
    }
    if (more.open) drawTable();
  };
  const drop = () => {
    drawn?.chart.destroy();
    drawn = null;
  };
  const again = () => {
    drop();
    draw();
  };
  const sizes = new ResizeObserver(() => drawn?.chart.setSize({width: plot.clientWidth, height: HEIGHT}));
  sizes.observe(plot);
  document.addEventListener("memoire:theme", again);
  return {
    element,
    set(x, lines) {
      data = {x, lines};
      draw();
    },
    close() {
      document.removeEventListener("memoire:theme", again);
      sizes.disconnect();
      drop();
    },
  };
}

/** The line of a figure in an answer of api/curves, with its band. */
export const lineOf = ({mean, least, greatest}, figureName, name) => ({name, values: mean[figureName], low: least[figureName], high: greatest[figureName]});

function optionsOf({format, isTime, sync, zoom, top}, plot, lines) {
  const [ink, grid] = [colour("--quiet"), colour("--grid")];
  const axis = {stroke: ink, grid: {stroke: grid, width: 1}, ticks: {stroke: grid, width: 1}, font: "12px system-ui"};
  const shownX = (value) => (value === null || value === undefined ? "–" : isTime ? clock(value) : count(value));
  return {
    width: plot.clientWidth || 400,
    height: HEIGHT,
    scales: {x: {time: isTime}, ...(top ? {y: {range: (_, low, high) => [0, Math.max(top, high)]}} : {})},
    padding: [10, 28, 0, 0],
    cursor: {sync: sync ? {key: sync} : undefined, drag: {x: true, y: false, setScale: !zoom}, points: {size: 6}},
    legend: {live: true, markers: {width: 0, fill: (chart, at) => at && chart.series[at].tint}},
    series: [{label: isTime ? "time" : "steps", value: (_, value) => shownX(value)}, ...lines.flatMap((line, at) => seriesOf(line, at, format))],
    bands: bandsOf(lines),
    axes: [{...axis, size: 34, ...(isTime ? hours : {values: (_, ticks) => ticks.map(figure)})},
      {...axis, size: 70, incrs: format === count ? WHOLE : undefined, values: (_, ticks) => ticks.map(format)}],
    hooks: {
      ready: [tellNewest], setData: [tellNewest], setCursor: [tellNewest], setSeries: [followed],
      setSelect: zoom ? [(chart) => selected(chart, zoom)] : [],
    },
  };
}

const shade = (at) => colour(`--line-${(at % LINES) + 1}`);

/** Whether a line has a band that is anywhere more than the line. */
function hasBand({values, low, high}) {
  return Boolean(low && high && values.some((value, at) => value !== null && low[at] < high[at]));
}

/** The line itself, then the ends of its band. */
const columnsOf = (lines) => lines.flatMap((line) => (hasBand(line) ? [line.values, line.high, line.low] : [line.values]));

function seriesOf(line, at, format) {
  const plain = {spanGaps: true, points: {show: false}, value: (_, value) => (value === null || value === undefined ? "–" : format(value))};
  const main = {...plain, label: line.name, stroke: shade(at), tint: shade(at), width: 1.6, dash: at >= LINES ? [5, 4] : undefined};
  const end = (name) => ({...plain, label: `${line.name}, ${name}`, class: "band-end", width: 0, of: line.name});
  return hasBand(line) ? [main, end("greatest"), end("least")] : [main];
}

function bandsOf(lines) {
  const bands = [];
  let place = 1;
  lines.forEach((line, at) => {
    if (hasBand(line)) bands.push({series: [place + 1, place + 2], fill: shade(at).replace(/^rgb\((.*)\)$/, "rgba($1, 0.16)")});
    place += hasBand(line) ? 3 : 1;
  });
  return bands;
}

/** A band is shown where its line is. */
function followed(chart, at, {show}) {
  const name = chart.series[at]?.label;
  if (show === undefined || !at) return;
  chart.series.forEach((each, place) => {
    if (each.of === name && each.show !== show) chart.setSeries(place, {show});
  });
}

/** While nobody points at a chart, its legend says the newest figures. */
function tellNewest(chart) {
  if (chart.cursor.idx !== null && chart.cursor.idx !== undefined) return;
  const [x, ...lines] = chart.data;
  let at = x.length - 1;
  while (at > 0 && lines.every((values) => values[at] === null)) at -= 1;
  chart.setLegend({idx: at}, false);
}

/** Hours and minutes; seconds where ticks are closer than a minute. */
const hours = {
  values: (_, ticks) => ticks.map((tick) => (ticks[1] - ticks[0] < 60 ? clock(tick) : clock(tick).slice(0, -3))),
  space: 90,
};

function selected(chart, zoom) {
  const {left, width} = chart.select;
  if (width > 3) zoom(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
  chart.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
}

/** Every line by itself, with its newest value. */
function plainly(lines) {
  return lines.map(({name, values}) => h("div", h("span.quiet", `${name}: ${figure(newest(values))}`), spark(values, name)));
}

const newest = (values) => values.findLast((value) => value !== null) ?? null;

function figuresOf(title, {x, lines}, format, isTime) {
  const step = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
  const chosen = x.map((_, at) => at).filter((at) => (x.length - 1 - at) % step === 0).reverse();
  const head = h("tr", h("th", {scope: "col"}, isTime ? "time" : "steps"), lines.map(({name}) => h("th.number", {scope: "col"}, name)));
  const body = chosen.map((at) => h("tr", h("td", isTime ? clock(x[at]) : count(x[at])),
    lines.map(({values}) => h("td.number", values[at] === null ? "–" : format(values[at])))));
  return h("div.scroll", {tabindex: "0", role: "region", "aria-label": `${title}: figures`},
    h("table", h("caption.hidden-text", title), h("thead", head), h("tbody", body)));
}
