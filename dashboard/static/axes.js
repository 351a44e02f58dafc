// What charts have on x: time of day, time since the beginning, steps, versions of a model. Where the ticks lie, and their words.
import {clock, count, duration, figure} from "./format.js";

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

/** Ticks at whole seconds, minutes, hours or days; as many as there is room for. On the clock of this place, or from 0. */
function timeSplits(isClock) {
  return (chart, _, low, high) => {
    const most = Math.max(2, Math.floor(chart.bbox.width / devicePixelRatio / ROOM));
    const step = SECONDS.find((each) => (high - low) / each <= most) ?? SECONDS.at(-1);
    const shift = isClock ? new Date(low * 1000).getTimezoneOffset() * MINUTE : 0;
    const first = Math.ceil((low - shift) / step) * step + shift;
    return Array.from({length: Math.max(0, Math.floor((high - first) / step) + 1)}, (_, at) => first + at * step);
  };
}

/** Hours and minutes; seconds where ticks are closer than a minute; the day at midnight, and below the first tick where it is not today. */
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

/** 0, 30 s, 5 min, 1 h 30: how long after the beginning. */
function elapsedLabels(_, ticks) {
  return ticks.map((tick) => {
    const [hours, minutes, seconds] = [Math.floor(tick / HOUR), Math.floor((tick % HOUR) / MINUTE), tick % MINUTE];
    if (tick >= DAY) return `${figure(tick / DAY)} d`;
    if (hours) return `${hours} h${minutes ? ` ${pad(minutes)}` : ""}`;
    if (minutes) return seconds ? `${minutes}:${pad(seconds)}` : `${minutes} min`;
    return seconds ? `${seconds} s` : "0";
  });
}
