// Live: charts of the cluster over time, with a shared cross-hair; drag to zoom in.
import {get} from "../api.js";
import {lineOf, makeChart} from "../charts.js";
import {marksOf, withGaps} from "../curves.js";
import {fill, h} from "../dom.js";
import {bytes, clock, count, duration, share} from "../format.js";
import {rangeChoice, spanOf} from "../overtime.js";
import {every, showProblem} from "../parts.js";
import {remember} from "../router.js";

const CHARTS = [
  {title: "Steps and samples", unit: "per second", names: {steps_per_second: "steps recorded", samples_per_second: "samples drawn"}},
  {title: "Samples per step", unit: "drawn for each step recorded", names: {samples_per_insert: "samples per step"}},
  {title: "Waiting", unit: "share of the learner's time, share of the actors' caches", format: share, top: 0.1, names: {waiting_share: "learner waits", skipped_share: "caches skipped"}},
  {title: "Age of samples", unit: "since they were recorded", format: duration, names: {sample_age_median: "median", sample_age_p90: "9 in 10 below", sample_age_max: "oldest"}},
  {title: "Models behind the newest", unit: "versions", names: {sample_lag_mean: "mean", sample_lag_max: "largest"}},
  {title: "Request time", unit: "at servers", format: duration, names: {request_p50: "median", request_p99: "99 % below"}},
  {title: "Episodes and caches", unit: "per second", names: {episodes_per_second: "episodes", caches_per_second: "caches"}},
  {title: "Bytes", unit: "per second", format: bytes, names: {generated_bytes_per_second: "recorded", received_bytes_per_second: "received"}},
  {title: "Actors", format: count, names: {actors_active: "active", actors_silent: "silent"}},
  {title: "Refused messages and log lines", unit: "per second", names: {refused_per_second: "refused", log_lines_per_second: "log lines"}},
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
      rangeChoice(state.range, change));
  };
  const change = (changes) => {
    state = {...state, ...changes};
    remember(changes);
    drawRange();
    refresh();
  };
  fill(root, h("div.bar", range, h("span.quiet", "Drag across a chart to zoom in. Shades span the lowest to the highest value; in gray stretches no dashboard was running.")), message,
    h("div.grid.wide", charts.map(({chart}) => chart.element)));
  drawRange();
  const refresh = every(2, signal, stream, async () => {
    const asked = {name: NAMES, points: 300, ...spanOf(state, stream)};
    const [curves, events] = await Promise.all([get("curves", asked, signal), get("events", {}, signal)]);
    const extras = {away: curves.away, marks: marksOf(events, curves, curves.time, true)};
    for (const {chart, names} of charts) chart.set(...withGaps(curves, Object.entries(names).map(([name, title]) => lineOf(curves, name, title))), extras);
  }, (error) => showProblem(message, error));
  return {
    route(changed) {
      state = Object.fromEntries(changed);
      drawRange();
      refresh();
    },
  };
}
