// Charts of lines over time, steps or versions. Only this module uses uPlot; if it is not installed, charts are plain lines.
// Each chart has a table of its figures, for readers who cannot see it, and can be read with the arrow keys.
import {AXES, drawGoal, drawMarks, drawTicks, shadeAway} from "./axes.js";
import {fill, h, say} from "./dom.js";
import {bytes, count, figure} from "./format.js";
import {term} from "./help.js";
import {spark} from "./histogram.js";
import {colour} from "./theme.js";

const HEIGHT = 200;
const LINES = 6; // colours in the style sheet
const TABLE_ROWS = 60;
const NEAR = 6; // pixels from a mark within which its text is shown
const WHOLE = Array.from({length: 15}, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat(); // no half actors or bytes
const NOTHING = {away: [], marks: [], ticks: [], goal: null, axis: null, range: null};
const isSet = (value) => value !== null && value !== undefined;

/**
 * A chart: {element, set(x, lines, extras), close()}.
 *
 * Lines are [{name, values, low?, high?, bands?, faint?, shade?}]. In values, null is a gap and undefined is nothing at this x: the line
 * goes on. Between low and high lies a band, the least and the greatest of each bucket, so that spikes show in a coarse curve;
 * bands [{name, low, high}] are further ones. `shade` is the number of its colour, `faint` a line that stays behind others.
 * Extras: axis (a name of AXES), away [[from, to]] is shaded, marks [{x, kind, text}] are upright lines, ticks [x] short ones at the
 * foot, goal a level line, range [from, to] of x.
 * Options: title, named (its entry in TERMS), unit, format(value), isTime, sync (charts of one name share their cross-hair), zoom(from, to), top (the axis goes
 * from 0 to this at least), height, tools (elements beside the title), note (a line below the title).
 */
export function makeChart({title, named = "", unit = "", format = figure, isTime = true, sync = "", zoom = null, top = 0, height = HEIGHT, tools = null, note = null}) {
  const plot = h("div.plot", {tabindex: "0", role: "group", "aria-label": `${title}: a chart; the left and right arrow keys read it`});
  const tip = h("div.chart-tip", {"aria-hidden": "true", hidden: true});
  const spoken = h("p.hidden-text", {role: "status"});
  const rows = h("div");
  const more = h("details", {toggle: () => more.open && drawTable()}, h("summary", "Figures as a table"), rows);
  const kind = {title, format, isTime, sync, zoom, top, height, plot, tip};
  const legend = legendOf((name, isShown) => show(name, isShown));
  const caption = h("figcaption", h("span.title", named ? term(named, title) : title, unit && h("span.quiet", ` ${unit}`)), tools);
  const element = h("figure.card.chart", caption, note, plot, legend.element, spoken, more);
  plot.style.minHeight = `${height}px`;
  let drawn = null; // {chart, key}
  let data = {x: [], lines: [], extras: NOTHING};

  const axis = () => AXES[data.extras.axis ?? (isTime ? "time" : "steps")];
  const drawTable = () => fill(rows, figuresOf(title, data, format, axis()));
  const show = (name, isShown) => {
    drawn?.chart.series.forEach((each, place) => each.of === name && drawn.chart.setSeries(place, {show: isShown}));
  };
  const read = (chart) => {
    const at = isSet(chart.cursor.idx) ? chart.cursor.idxs : null;
    legend.tell(data.lines.map(({values}, line) => format(at ? values[at[chart.places[line]]] : newest(values))));
    tellTip(chart, kind, data, axis());
  };
  const draw = () => {
    const {x, lines, extras} = data;
    const isEmpty = !lines.some(({values}) => values.some(isSet));
    const key = JSON.stringify([extras.axis, lines.map((line) => [line.name, line.shade, bandsOf(line).length])]);
    if (isEmpty || !window.uPlot) {
      drop();
      legend.set([]);
      fill(plot, isEmpty ? h("p.empty", "Nothing to draw in this range yet.") : plainly(lines));
    } else if (drawn?.key === key) {
      drawn.chart.extras = extras;
      drawn.chart.setData([x, ...columnsOf(lines)]);
    } else {
      drop();
      fill(plot, tip);
      const chart = new window.uPlot(optionsOf(kind, lines, axis(), extras, read), [x, ...columnsOf(lines)], plot);
      drawn = {key, chart};
      legend.set(lines.map(({name, shade: own}, at) => ({name, tint: shade(own ?? at)})));
      legend.hidden.forEach((name) => show(name, false));
      read(chart);
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
  plot.addEventListener("keydown", (event) => drawn && step(event, drawn.chart, (at) => say(spoken, wordsOf(data, at, format, axis()))));
  plot.addEventListener("blur", () => drawn?.chart.setCursor({left: -10, top: -10}));
  const sizes = new ResizeObserver(() => drawn && plot.clientWidth && drawn.chart.setSize({width: plot.clientWidth, height}));
  sizes.observe(plot);
  document.addEventListener("memoire:theme", again);
  return {
    element,
    set(x, lines, extras = {}) {
      data = {x, lines, extras: {...NOTHING, ...extras}};
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

function optionsOf({format, sync, zoom, top, height, plot}, lines, x, extras, read) {
  const [ink, grid] = [colour("--quiet"), colour("--grid")];
  const axis = {stroke: ink, grid: {stroke: grid, width: 1}, ticks: {show: false}, font: "11.5px system-ui, sans-serif"};
  const isHigh = (values) => values?.some((text) => text?.includes("\n"));
  return {
    width: plot.clientWidth || 400,
    height,
    scales: {
      x: {time: false, range: (chart, low, high) => chart.extras?.range ?? (low === high ? [low - 1, high + 1] : [low, high])},
      y: {range: (chart, low, high) => spanOf(low, high, top, chart.extras?.goal ?? extras.goal, format)},
    },
    padding: [12, 27, 0, 4], // half of a time with its seconds is beyond the last tick
    cursor: {sync: sync ? {key: sync} : undefined, drag: {x: true, y: false, setScale: !zoom}, points: {size: 7, width: 1.5}, dataIdx: nearest},
    legend: {show: false},
    series: [{}, ...lines.flatMap(seriesOf)],
    bands: shadesOf(lines),
    axes: [
      {...axis, space: 70, splits: x.splits, values: x.values, size: (_, values) => (isHigh(values) ? 42 : 28), gap: 6},
      {...axis, size: widthOfLabels, space: 34, gap: 6, incrs: format === count || format === bytes ? WHOLE : undefined, values: (_, ticks) => ticks.map(format)},
    ],
    hooks: {
      init: [(chart) => Object.assign(chart, {extras, places: placesOf(lines)})],
      drawClear: [shadeAway], draw: [drawTicks, drawMarks, (chart) => drawGoal(chart, format)],
      setData: [read], setCursor: [read],
      setSelect: zoom ? [(chart) => selected(chart, zoom)] : [],
    },
  };
}

/** Range of y: with a margin, from 0 if that is near, and including the goal. */
function spanOf(low, high, top, goal, format) {
  if (!isSet(low)) return [0, top || 1];
  if (isSet(goal)) [low, high] = [Math.min(low, goal), Math.max(high, goal)];
  const isFromZero = low >= 0 && (top || low <= high / 2 || low === high);
  const air = (high - (isFromZero ? 0 : low)) * 0.07 || Math.abs(high) * 0.1 || 1;
  const upper = Math.max(top, high === 0 && format === count ? 2 : high + air);
  return [isFromZero ? 0 : low - air, upper];
}

/** Width of the longest label of the axis. */
function widthOfLabels(_, values) {
  const longest = Math.max(3, ...(values ?? []).map((text) => text?.length ?? 0));
  return Math.round(14 + longest * 6.6);
}

const shade = (at) => colour(`--line-${(at % LINES) + 1}`);
const faded = (tint, part) => tint.replace(/^rgb\((.*)\)$/, `rgba($1, ${part})`);

/** Bands of a line that have a width anywhere, the widest first. */
function bandsOf({values, low, high, bands = []}) {
  const all = low && high ? [...bands, {low, high}] : bands;
  return all.filter((band) => values.some((value, at) => isSet(value) && isSet(band.low[at]) && band.low[at] < band.high[at]));
}

/** The line itself, then the ends of its bands. */
const columnsOf = (lines) => lines.flatMap((line) => [line.values, ...bandsOf(line).flatMap(({high, low}) => [high, low])]);

/** Index of each line in uPlot's series. */
function placesOf(lines) {
  let place = 1;
  return lines.map((line) => {
    const mine = place;
    place += 1 + 2 * bandsOf(line).length;
    return mine;
  });
}

function seriesOf(line, at) {
  const number = line.shade ?? at;
  const tint = line.faint ? faded(shade(number), 0.35) : shade(number);
  const plain = {of: line.name, spanGaps: false, points: {show: false}};
  const dots = {show: (chart, place) => isSparse(chart.data[place]), size: 4, fill: tint, stroke: tint};
  const end = {...plain, width: 0, alpha: 1};
  return [{...plain, points: dots, stroke: tint, width: line.faint ? 1 : 2, dash: number >= LINES ? [5, 4] : undefined},
    ...bandsOf(line).flatMap(() => [end, end])];
}

/** True if there are so few values that a line alone would hide them. */
function isSparse(values) {
  let known = 0;
  for (const value of values) {
    known += isSet(value);
    if (known > 3) return false;
  }
  return true;
}

function shadesOf(lines) {
  const places = placesOf(lines);
  return lines.flatMap((line, at) => bandsOf(line).map((_, band) => ({
    series: [places[at] + 1 + 2 * band, places[at] + 2 + 2 * band], fill: faded(shade(line.shade ?? at), 0.13),
  })));
}

/** The cross-hair reads the nearest value of each line, not an empty place beside it. */
function nearest(chart, place, at) {
  const values = chart.data[place];
  if (place === 0 || isSet(values[at])) return at;
  let [before, after] = [at, at];
  while (before >= 0 && !isSet(values[before])) before -= 1;
  while (after < values.length && !isSet(values[after])) after += 1;
  if (before < 0 || after >= values.length) return before < 0 ? (after < values.length ? after : at) : before;
  const x = chart.data[0];
  return x[at] - x[before] <= x[after] - x[at] ? before : after;
}

const isRead = (plot) => plot.matches(":hover") || plot === document.activeElement;

/** Show the values under the cross-hair in a small box, only on the chart under the pointer or with the focus. */
function tellTip(chart, {plot, tip, format}, {x, lines, extras}, axis) {
  const {left, idx, idxs} = chart.cursor;
  tip.hidden = !(isSet(idx) && left >= 0 && isRead(plot));
  if (tip.hidden) return;
  const shown = lines.map((line, at) => [line, at]).filter(([, at]) => chart.series[chart.places[at]].show);
  const near = extras.marks.filter((mark) => Math.abs(chart.valToPos(mark.x, "x") - left) < NEAR);
  fill(tip, h("b", axis.show(x[idx])), near.map(({text}) => h("p", text)),
    h("dl", shown.map(([line, at]) => valueOf(line, at, idxs[chart.places[at]], format))));
  const edge = chart.over.offsetLeft + left;
  const isRight = left > chart.over.clientWidth / 2;
  tip.style.left = isRight ? "" : `${edge + 14}px`;
  tip.style.right = isRight ? `${plot.clientWidth - edge + 14}px` : "";
}

function valueOf(line, number, at, format) {
  const swatch = h("span.swatch");
  swatch.style.background = shade(line.shade ?? number);
  const around = bandsOf(line).map((band) => `${format(band.low[at])} … ${format(band.high[at])}`).join(", ");
  return [h("dt", swatch, line.name), h("dd", format(line.values[at]), around && h("span.quiet", ` (${around})`))];
}

const wordsOf = ({x, lines}, at, format, axis) => `${axis.show(x[at])}: ${lines.map(({name, values}) => `${name} ${format(values[at])}`).join(", ")}`;

/** Arrow keys move the cross-hair; with Shift by a tenth. */
function step(event, chart, report) {
  const way = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!way) return;
  event.preventDefault();
  const x = chart.data[0];
  const size = event.shiftKey ? Math.ceil(x.length / 10) : 1;
  const at = Math.min(x.length - 1, Math.max(0, (chart.cursor.idx ?? x.length) + way * size));
  chart.setCursor({left: chart.valToPos(x[at], "x"), top: 10});
  report(at);
}

function selected(chart, zoom) {
  const {left, width} = chart.select;
  if (width > 3) zoom(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
  chart.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
}

/** Each line by itself, with its newest value. */
function plainly(lines) {
  return lines.map(({name, values}) => h("div", h("span.quiet", `${name}: ${figure(newest(values))}`), spark(values.map((value) => value ?? null), name)));
}

const newest = (values) => values.findLast(isSet) ?? null;

function figuresOf(title, {x, lines, extras}, format, axis) {
  const size = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
  const chosen = x.map((_, at) => at).filter((at) => (x.length - 1 - at) % size === 0).reverse();
  const head = h("tr", h("th", {scope: "col"}, axis.name), lines.map(({name}) => h("th.number", {scope: "col"}, name)));
  const body = chosen.map((at) => h("tr", h("td", axis.show(x[at])), lines.map(({values}) => h("td.number", format(values[at] ?? null)))));
  return [isSet(extras.goal) && h("p", `Goal: ${format(extras.goal)}`),
    extras.marks.length > 0 && h("ul.marked", extras.marks.slice(-TABLE_ROWS).map((mark) => h("li", `${axis.show(mark.x)}: ${mark.text}`))),
    h("div.scroll", {tabindex: "0", role: "region", "aria-label": `${title}: figures`},
      h("table", h("caption.hidden-text", title), h("thead", head), h("tbody", body)))];
}

/**
 * The legend, a button for each line with its colour and the value that is pointed at: {element, hidden, set(lines), tell(values)}. A click
 * hides or shows the line and calls `change(name, isShown)`.
 */
function legendOf(change) {
  const element = h("div.legend");
  const hidden = new Set();
  let values = [];
  const toggle = (button, name) => {
    const isShown = hidden.delete(name);
    if (!isShown) hidden.add(name);
    button.setAttribute("aria-pressed", String(isShown));
    change(name, isShown);
  };
  const entry = ({name, tint}) => {
    const swatch = h("span.swatch");
    swatch.style.background = tint;
    const value = h("b");
    const button = h("button", {type: "button", "aria-pressed": String(!hidden.has(name)), title: "Hide or show", click: () => toggle(button, name)},
      swatch, h("span", name), value);
    return {button, value};
  };
  return {
    element,
    hidden,
    set(lines) {
      const entries = lines.map(entry);
      values = entries.map(({value}) => value);
      fill(element, entries.map(({button}) => button));
    },
    tell(texts) {
      texts.forEach((text, at) => values[at] && say(values[at], text));
    },
  };
}
