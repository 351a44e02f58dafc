// Chart of the returns of episodes over steps, time or model versions, beside other runs and the goal.
import {get} from "./api.js";
import {makeChart} from "./charts.js";
import {columnsOf, marksOf, placesOn, ticksOf, together} from "./curves.js";
import {fill, h} from "./dom.js";
import {figure} from "./format.js";
import {choice, every, tickMenu} from "./parts.js";

const QUANTILES = [10, 25, 50, 75, 90].map((part) => `return_p${part}`);
const TESTED = "test_return";
const POINTS = 400;
const MOST_BESIDE = 5;
const MOST_RUNS = 20; // in the menu
const SMOOTH = {off: 1, some: 5, much: 20};
const ACTORS = "Median of the actors, each by its last 20 episodes. The shades hold half of the actors, and 8 in 10 of them.";
const EPISODES = "Mean of the episodes that ended; the shade spans the lowest to the highest return.";

const isChosen = (state) => (state.beside ? state.beside.split("\n") : []);

/** Runs to draw: the current one, if there is one, and those chosen beside it. */
export function shownRuns(runs, state) {
  const beside = isChosen(state).map((name) => runs.find((run) => run.name === name && !run.is_current)).filter(Boolean);
  return [...runs.filter((run) => run.is_current), ...beside.slice(0, MOST_BESIDE)];
}

/**
 * {element, refresh(), values}: the chart with its controls. `state` is of the page: over, beside, smooth; `change(changes)` remembers
 * parts of it. `values` are the known values of the first run's curve as last drawn.
 */
export function makeReturns({state, change, stream, signal, height}) {
  const tools = h("div.bar.tools-of-chart");
  const note = h("p.quiet.note");
  const chart = makeChart({title: "Return of episodes", height, tools, note, sync: "learning"});
  signal.addEventListener("abort", () => chart.close());
  const cached = new Map(); // curves of runs that are over
  let drawnTools = "";

  const refresh = every(3, signal, stream, async () => {
    const overview = stream.newest;
    const topics = Object.keys(overview?.models ?? {});
    const names = ["return", TESTED, ...QUANTILES, "nodes_up", ...topics.map((topic) => `model.${topic}`)];
    const [runs, events] = await Promise.all([get("runs", {}, signal), get("events", {}, signal)]);
    drawTools(runs, topics);
    const shown = shownRuns(runs, state);
    const answers = await Promise.all(shown.map((run) => curvesOf(run, names)));
    const topic = topics.includes(state.topic) ? state.topic : topics[0] ?? "";
    draw(shown, answers, axisOf(state.over, shown.length, topics), topic, events, overview?.learning.goal ?? null);
  });

  async function curvesOf(run, names) {
    if (!run.is_current && cached.has(run.name)) return cached.get(run.name);
    const curves = await get("curves", {run: run.name, name: names, since: 0, points: POINTS}, signal);
    if (!run.is_current) cached.set(run.name, curves);
    return curves;
  }

  function draw(runs, answers, axis, topic, events, goal) {
    const isOne = runs.length === 1;
    const sources = answers.map((answer, at) => sourceOf(answer, axis, topic, runs[at].began, SMOOTH[state.smooth] ?? SMOOTH.some));
    const {x, columns} = together(sources);
    let first = 0;
    const lines = sources.map(({kind, columns: own}, at) => {
      const mine = columns.slice(first, first + own.length);
      first += own.length;
      const name = isOne ? (kind === "actors" ? "median actor" : "mean of episodes") : runs[at].name;
      return lineOf(kind, name, mine, isOne, at);
    });
    const answer = answers[0];
    if (isOne && answer?.mean[TESTED]?.some((value) => value !== null)) {
      lines.push({name: "test episodes", shade: 1, values: columns[first - 1]});
    }
    const extras = {axis, goal};
    if (answer) {
      const xs = sources[0].xs;
      extras.away = axis === "time" ? answer.away : [];
      extras.marks = marksOf(events, answer, xs, axis === "time");
      extras.ticks = axis === "version" ? [] : ticksOf(answer, topic, xs);
    }
    chart.set(x, lines, extras);
    fill(note, sources[0]?.kind === "actors" ? ACTORS : EPISODES, extras.ticks?.length ? " Ticks at the foot: a new model." : "");
    returns.values = sources[0] ? sources[0].columns[0].filter((value) => value !== null && value !== undefined) : [];
  }

  function drawTools(runs, topics) {
    const others = runs.filter((run) => !run.is_current).toReversed().slice(0, MOST_RUNS);
    const key = JSON.stringify([others.map(({name}) => name), topics, state.over, state.beside, state.smooth]);
    if (key === drawnTools) return;
    drawnTools = key;
    const isOpen = tools.querySelector("details")?.open;
    const overs = [["steps", "over steps"], ["time", "over time"], ...topics.slice(0, 1).map(() => ["version", "over model versions"])];
    fill(tools, besideMenu(others, isChosen(state), isOpen, (chosen) => change({beside: chosen.join("\n")})),
      choice("Smoothing", [["off", "not smoothed"], ["some", "smoothed"], ["much", "smoothed more"]], state.smooth ?? "some", (smooth) => change({smooth})),
      choice("Over", overs, state.over ?? "steps", (over) => change({over})));
  }

  if (!stream.newest) stream.addEventListener("overview", refresh, {once: true, signal}); // the overview has the goal
  const returns = {element: chart.element, refresh, values: []};
  return returns;
}

/** Several runs are compared by the time since their beginning, not by the time of day. */
function axisOf(over = "steps", runs, topics) {
  if (over === "version" && topics.length) return "version";
  if (over !== "time") return "steps";
  return runs > 1 ? "elapsed" : "time";
}

/** Columns of one run: of its actors, or of its episodes if the actors are not known apart. */
function sourceOf(answer, axis, topic, began, width) {
  const xs = placesOn(axis, answer, began, topic);
  const isOfActors = answer.mean.return_p50?.some((value) => value !== null);
  const columns = isOfActors ? QUANTILES.map((name) => columnsOf(answer, name, width)[0]) : columnsOf(answer, "return", width);
  const ordered = isOfActors ? [columns[2], columns[0], columns[4], columns[1], columns[3]] : columns;
  const tested = columnsOf(answer, TESTED, width)[0];
  return {kind: isOfActors ? "actors" : "episodes", xs, time: answer.time, away: answer.away, columns: [...ordered, tested]};
}

function lineOf(kind, name, columns, isOne, shade) {
  if (kind === "episodes") return {name, shade, values: columns[0], ...(isOne ? {low: columns[1], high: columns[2]} : {})};
  const [values, p10, p90, p25, p75] = columns;
  const bands = isOne ? [{low: p10, high: p90}, {low: p25, high: p75}] : [{low: p25, high: p75}];
  return {name, shade, values, bands};
}

/** A menu of the runs to draw beside this one. */
function besideMenu(others, chosen, isOpen, change) {
  if (!others.length) return null;
  const toggle = (name, isOn) => change(isOn ? [...chosen, name].slice(-MOST_BESIDE) : chosen.filter((each) => each !== name));
  const boxes = others.map(({name, facts}) => ({name, label: [name, h("span.quiet", figure(facts.return_mean))]}));
  return tickMenu(chosen.length ? `Compared with ${chosen.length} run${chosen.length > 1 ? "s" : ""}` : "Compare with", boxes, chosen, toggle, isOpen);
}
