// Curves of one or several runs on one x: time, time since the beginning, steps, or versions of a model. Gaps stay gaps.

const IS_SPARSE = /^(test_)?(return|length)(_p\d+)?$/; // known only when an episode ended: between episodes the line continues
const KINDS = {node_down: "bad", node_back: "good", node_restarted: "notice", run_began: "run", run_finished: "run"};
const MOST_MARKS = 60;

/** Where each bucket of an answer of api/curves lies on x; null if unknown. `topic` is that of the model for the axis "version". */
export function placesOn(axis, {time, steps, greatest}, began = time[0] ?? 0, topic = "") {
  if (axis === "time") return time;
  if (axis === "elapsed") return time.map((each) => each - began);
  return axis === "steps" ? steps : greatest[`model.${topic}`] ?? time.map(() => null);
}

/** A figure of an answer as columns [mean, least, greatest]: null is a gap, undefined continues the line. */
export function columnsOf({time, away, mean, least, greatest}, name, width = 1) {
  const isUp = mean.nodes_up ?? [];
  const gap = (value, at) => (value === null && IS_SPARSE.test(name) && isUp[at] !== 0 ? undefined : value);
  const [middle, low, high] = [mean, least, greatest].map((values) => (values[name] ?? []).map(gap));
  return [smoothed(middle, width, new Set(away.map(([, after]) => time.indexOf(after)))), low, high];
}

/** The mean over up to `width` newest values; it begins again after a gap and at each place of `starts`. */
export function smoothed(values, width, starts = new Set()) {
  let recent = [];
  return values.map((value, at) => {
    if (starts.has(at)) recent = [];
    if (value === undefined) return value;
    if (value === null) {
      recent = [];
      return value;
    }
    recent.push(value);
    if (recent.length > width) recent.shift();
    return recent.reduce((sum, each) => sum + each, 0) / recent.length;
  });
}

/**
 * Several sources on one x: [{xs, time, away, columns}] -> {x, columns}, all columns of all sources in their order. The lines of a
 * source break at stretches in which no dashboard ran.
 */
export function together(sources) {
  const rows = new Map();
  const width = sources.reduce((sum, {columns}) => sum + columns.length, 0);
  const rowAt = (x) => rows.get(x) ?? rows.set(x, new Array(width).fill(undefined)).get(x);
  let first = 0;
  for (const {xs, time, away, columns} of sources) {
    xs.forEach((x, at) => {
      if (x === null) return;
      const row = rowAt(x);
      columns.forEach((values, column) => {
        if (values[at] !== undefined && (values[at] !== null || row[first + column] === undefined)) row[first + column] = values[at];
      });
    });
    for (const x of breaksOf(xs, time, away)) rowAt(x).fill(null, first, first + columns.length);
    first += columns.length;
  }
  const x = [...rows.keys()].sort((a, b) => a - b);
  return {x, columns: Array.from({length: width}, (_, column) => x.map((each) => rows.get(each)[column]))};
}

/** Places on x within stretches in which no dashboard ran. */
function breaksOf(xs, time, away) {
  return away.map(([, after]) => time.indexOf(after)).filter((at) => at > 0 && xs[at - 1] !== null && xs[at] !== null && xs[at] > xs[at - 1])
    .map((at) => (xs[at - 1] + xs[at]) / 2);
}

/** Times and lines of an answer with a gap at each stretch in which no dashboard ran: [x, lines]. */
export function withGaps(answer, lines) {
  const {time, away} = answer;
  if (!away.length) return [time, lines];
  const sources = [{xs: time, time, away, columns: lines.flatMap(({values, low, high}) => [values, low ?? values, high ?? values])}];
  const {x, columns} = together(sources);
  return [x, lines.map((line, at) => ({...line, values: columns[3 * at], ...(line.low ? {low: columns[3 * at + 1], high: columns[3 * at + 2]} : {})}))];
}

/** Events of a run as marks of a chart: the newest ones. `xs` has the place of each bucket. */
export function marksOf(events, {time}, xs, isTime) {
  const place = (when) => (isTime ? when : xs[time.findIndex((each) => each >= when)] ?? null);
  const inside = events.filter((event) => time.length && event.time >= time[0] - 1 && event.time <= time.at(-1) + 60);
  return inside.slice(-MOST_MARKS).map((event) => ({x: place(event.time), kind: KINDS[event.kind] ?? "", text: event.text}))
    .filter(({x}) => x !== null && x !== undefined);
}

/** Places on x at which a newer model version first appears. */
export function ticksOf({greatest}, topic, xs) {
  const versions = greatest[`model.${topic}`] ?? [];
  let newest = versions.find((value) => value !== null) ?? 0;
  return xs.filter((x, at) => {
    const isNew = x !== null && versions[at] !== null && versions[at] > newest;
    if (isNew) newest = versions[at];
    return isNew;
  });
}
