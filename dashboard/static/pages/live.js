// How everything goes on, over time: charts that share their cross-hair; drag to look closer.
import {get} from "../api.js";
import {lineOf, makeChart} from "../charts.js";
import {fill, h} from "../dom.js";
import {bytes, clock, count, duration, figure, share} from "../format.js";
import {choice, every, showProblem} from "../parts.js";
import {remember} from "../router.js";
import {RANGES, spanOf} from "../ranges.js";

const CHARTS = [
  {title: "In and out", unit: "per second", names: {steps_per_second: "steps", samples_per_second: "samples"}},
  {title: "Episodes and caches", unit: "per second", names: {episodes_per_second: "episodes", caches_per_second: "caches"}},
  {title: "Who waits", unit: "share of time, of caches", format: share, top: 0.1, names: {waiting_share: "learner waits", skipped_share: "actors skip"}},
  {title: "Samples per insert", names: {samples_per_insert: "samples per insert"}},
  {title: "Age of samples", format: duration, names: {sample_age_median: "median", sample_age_p90: "nine in ten", sample_age_max: "oldest"}},
  {title: "Models behind the newest", names: {sample_lag_mean: "mean", sample_lag_max: "most"}},
  {title: "Time of a request", format: duration, names: {request_p50: "median", request_p99: "99 %"}},
  {title: "Bytes", unit: "per second", format: bytes, names: {generated_bytes_per_second: "generated", received_bytes_per_second: "arrived"}},
  {title: "Actors", format: count, names: {actors_active: "active", actors_silent: "silent"}},
  {title: "Refused, and log lines", unit: "per second", names: {refused_per_second: "refused", log_lines_per_second: "log lines"}},
];
const NAMES = CHARTS.flatMap(({names}) => Object.keys(names));

export function openLive({root, parameters, stream, signal}) {
  let state = Object.fromEntries(parameters);
  const message = h("div");
  const range = h("span");
  const zoom = (since, until) => change({since: since.toFixed(1), until: until.toFixed(1)});
  const charts = CHARTS.map((each) => ({...each, chart: makeChart({...each, sync: "live", zoom})}));
  signal.addEventListener("abort", () => charts.forEach(({chart}) => chart.close()));
  const drawRange = () => {
    const {since, until} = state;
    const whole = h("button", {type: "button", click: () => change({since: "", until: ""})}, "Back to now");
    fill(range, since ? [h("span.quiet", `${clock(Number(since))} – ${clock(Number(until))} `), whole] :
      choice("Range", RANGES, state.range ?? "300", (chosen) => change({range: chosen})));
  };
  const change = (changes) => {
    state = {...state, ...changes};
    remember(changes);
    drawRange();
    refresh();
  };
  fill(root, h("div.bar", range, h("span.quiet", "Drag across a chart to look closer. Shades reach from the least to the greatest value.")), message,
    h("div.grid.wide", charts.map(({chart}) => chart.element)));
  drawRange();
  const refresh = every(2, signal, stream, async () => {
    try {
      const found = await get("curves", {name: NAMES, points: 300, ...spanOf(state, stream)}, signal);
      for (const {chart, names} of charts) {
        chart.set(found.time, Object.entries(names).map(([name, title]) => lineOf(found, name, title)));
      }
      showProblem(message, null);
    } catch (error) {
      if (error.name !== "AbortError") showProblem(message, error);
    }
  });
  return {
    route(given) {
      state = Object.fromEntries(given);
      drawRange();
      refresh();
    },
  };
}
