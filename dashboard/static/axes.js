// X axes of charts (time of day, time since the beginning, steps, model versions), with their ticks and labels; and drawings beside
// the lines: stretches in which no dashboard ran, upright marks, ticks at the foot, the goal.
import {clock, count, duration, figure} from "./format.js";
import {colour} from "./theme.js";

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86_400;
const SECONDS = [1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 3 * HOUR,
  6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY, 84 * DAY];
const ROOM = 66; // pixels that a label takes

const isSet = (value) => value !== null && value !== undefined;
const pad = (number) => String(number).padStart(2, "0");
const dayOf = (date) => date.toLocaleDateString("en-GB", {day: "numeric", month: "short"});

/** Kinds of axes: `name` in tables, `show` writes one value in full, `splits` and `values` are uPlot's. */
export const AXES = {
  time: {name: "time", show: (value) => (isSet(value) ? clock(value) : "–"), splits: timeSplits(true), values: timeLabels},
  elapsed: {name: "since its beginning", show: (value) => (isSet(value) ? duration(value) : "–"), splits: timeSplits(false), values: elapsedLabels},
  steps: {name: "steps", show: (value) => count(value), values: (_, ticks) => ticks.map(figure)},
  version: {name: "model version", show: (value) => count(value), values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? figure(tick) : ""))},
};

/** Ticks at whole seconds, minutes, hours or days; as many as there is room for. In local time, or from 0. */
function timeSplits(isClock) {
  return (chart, _, low, high) => {
    const most = Math.max(2, Math.floor(chart.bbox.width / devicePixelRatio / ROOM));
    const step = SECONDS.find((each) => (high - low) / each <= most) ?? SECONDS.at(-1);
    const shift = isClock ? new Date(low * 1000).getTimezoneOffset() * MINUTE : 0;
    const first = Math.ceil((low - shift) / step) * step + shift;
    return Array.from({length: Math.max(0, Math.floor((high - first) / step) + 1)}, (_, at) => first + at * step);
  };
}

/** Hours and minutes; seconds where ticks are closer than a minute; the day at midnight, and below the first tick if it is not today. */
function timeLabels(_, ticks) {
  const step = ticks[1] - ticks[0];
  const today = new Date().toDateString();
  return ticks.map((tick, at) => {
    const date = new Date(tick * 1000);
    if (step >= DAY || (at && date.getHours() + date.getMinutes() + date.getSeconds() === 0)) return dayOf(date);
    const text = `${pad(date.getHours())}:${pad(date.getMinutes())}${step < MINUTE ? `:${pad(date.getSeconds())}` : ""}`;
    return !at && date.toDateString() !== today ? `${text}\n${dayOf(date)}` : text;
  });
}

/** Labels such as 0, 30 s, 5 min, 1 h 30: time since the beginning. */
function elapsedLabels(_, ticks) {
  return ticks.map((tick) => {
    const [hours, minutes, seconds] = [Math.floor(tick / HOUR), Math.floor((tick % HOUR) / MINUTE), tick % MINUTE];
    if (tick >= DAY) return `${figure(tick / DAY)} d`;
    if (hours) return `${hours} h${minutes ? ` ${pad(minutes)}` : ""}`;
    if (minutes) return seconds ? `${minutes}:${pad(seconds)}` : `${minutes} min`;
    return seconds ? `${seconds} s` : "0";
  });
}

// ------------------------------------------------------------------------------------------------------------------ beside the lines

const MOST_TICKS = 120;
const TINTS = {bad: "--bad", good: "--good", notice: "--notice", run: "--accent"};

/** Draw within the lines' rectangle alone, in pixels of the screen. */
function within(chart, work) {
  const {ctx, bbox} = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  work(ctx, bbox, devicePixelRatio);
  ctx.restore();
}

/** Shade the times in which no dashboard ran. */
export function shadeAway(chart) {
  within(chart, (ctx, {top, height}) => {
    ctx.fillStyle = colour("--sunk");
    for (const [from, to] of chart.extras?.away ?? []) {
      const left = chart.valToPos(from, "x", true);
      ctx.fillRect(left, top, Math.max(1, chart.valToPos(to, "x", true) - left), height);
    }
  });
}

/** An upright line with a head at each mark. */
export function drawMarks(chart) {
  within(chart, (ctx, {top, height}, unit) => {
    for (const {x, kind} of chart.extras.marks) {
      const left = Math.round(chart.valToPos(x, "x", true)) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = colour(TINTS[kind] ?? "--quiet");
      ctx.lineWidth = unit;
      ctx.setLineDash([3 * unit, 3 * unit]);
      ctx.beginPath();
      ctx.moveTo(left, top);
      ctx.lineTo(left, top + height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(left - 4 * unit, top);
      ctx.lineTo(left + 4 * unit, top);
      ctx.lineTo(left, top + 6 * unit);
      ctx.fill();
    }
  });
}

/** Short ticks at the foot: at most MOST_TICKS, so that a reader can distinguish them. */
export function drawTicks(chart) {
  const {ticks} = chart.extras;
  const every = Math.max(1, Math.ceil(ticks.length / MOST_TICKS));
  within(chart, (ctx, {top, height}, unit) => {
    ctx.fillStyle = colour("--line-5");
    ticks.forEach((x, at) => at % every === 0 && ctx.fillRect(chart.valToPos(x, "x", true), top + height - 6 * unit, unit, 6 * unit));
  });
}

/** A level line with its value above it, or below it if there is no room above. */
export function drawGoal(chart, format) {
  const {goal} = chart.extras;
  if (goal === null || goal === undefined) return;
  within(chart, (ctx, {left, top, width}, unit) => {
    const y = Math.round(chart.valToPos(goal, "y", true)) + 0.5;
    ctx.strokeStyle = ctx.fillStyle = colour("--good");
    ctx.lineWidth = 1.5 * unit;
    ctx.setLineDash([7 * unit, 5 * unit]);
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left + width, y);
    ctx.stroke();
    ctx.font = `600 ${12 * unit}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    const isBelow = y - top < 18 * unit;
    ctx.textBaseline = isBelow ? "top" : "bottom";
    ctx.fillText(`goal ${format(goal)}`, left + width - 4 * unit, isBelow ? y + 4 * unit : y - 3 * unit);
  });
}
