// Is it well? Totals with their rates, what holds the run up, and five answers in words.
import {get} from "../api.js";
import {fill, h, patch} from "../dom.js";
import {bytes, count, duration, figure, NONE, partOf, share, until, words} from "../format.js";
import {every, facts, table} from "../parts.js";
import {address} from "../router.js";
import {spark} from "../spark.js";

const TILES = [
  {name: "steps", title: "Total steps", total: (totals) => totals.steps},
  {name: "episodes", title: "Total episodes", total: (totals) => totals.episodes},
  {name: "caches", title: "Total caches", total: (totals) => totals.accepted_caches},
];
const CURVES = [...TILES.map(({name}) => `${name}_per_second`), "return", "sample_age_median"];
const SPAN = 600;
const NEAR = 5; // values on either side that a former run is compared by
const LEVELS = {good: "All well", notice: "Notice", bad: "Trouble"};

export function openOverview({root, stream, signal}) {
  const verdicts = h("ul.verdicts", {"aria-label": "How the cluster stands", "aria-live": "polite"});
  const rest = h("div", h("p.quiet", "Waiting for the first look at the nodes …"));
  fill(root, verdicts, rest);
  let curves = {};
  let former = null;
  every(30, signal, stream, async () => {
    former = await formerRun(signal);
  });
  every(3, signal, stream, async () => {
    const since = Math.max(0, (stream.newest?.time ?? Date.now() / 1000) - SPAN);
    curves = (await get("curves", {name: CURVES, since, points: 150}, signal)).mean;
  });
  return {
    update(overview) {
      patch(verdicts, overview.verdicts.map((each) => verdict(each, overview.verdicts[0].level)));
      const line = (name) => spark(curves[name] ?? [], `${words(name)}, the last ten minutes`);
      patch(rest, sections(overview, line, {trend: trendOf(curves.return ?? []), former}));
    },
  };
}

/** The run before the one that is counted now, with its returns over steps; null where there is none. */
async function formerRun(signal) {
  const before = (await get("runs", {}, signal)).filter((run) => !run.is_current).at(-1);
  if (!before) return null;
  const {steps, mean} = await get("curves", {run: before.name, name: ["return"], since: 0, points: 400}, signal);
  return {name: before.name, steps, returns: mean.return};
}

/** What the former run returned when it had counted as many steps: the mean of what is nearest; null where it had not. */
function returnAt({steps, returns}, now) {
  const known = steps.map((each, at) => [each, returns[at]]).filter(([each, value]) => each !== null && value !== null);
  const after = known.findIndex(([each]) => each >= now);
  if (after < 0) return null;
  const near = known.slice(Math.max(0, after - NEAR), after + NEAR).map(([, value]) => value);
  return near.reduce((sum, value) => sum + value, 0) / near.length;
}

/** "rising", "falling" or "level": the newest third of values against the oldest, by their standard errors; "" where few are known. */
function trendOf(values) {
  const known = values.filter((value) => value !== null);
  const size = Math.floor(known.length / 3);
  if (size < 5) return "";
  const [before, after] = [about(known.slice(0, size)), about(known.slice(-size))];
  const error = Math.sqrt((before.variance + after.variance) / size);
  if (Math.abs(after.mean - before.mean) <= 2 * error) return "level";
  return after.mean > before.mean ? "rising" : "falling";
}

function about(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return {mean, variance: values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length};
}

function sections(overview, line, learned) {
  return [
    h("div.grid", TILES.map((each) => tile(each, overview, line))),
    h("div.grid.five", learning(overview, line, learned), waiting(overview), fresh(overview, line), actors(overview), room(overview)),
    tableOf(overview),
  ];
}

function tile({name, title, total}, {totals, rates}, line) {
  return h("section.card.tile", h("div.label", title), h("div.value", count(total(totals))),
    h("div.rate", `${figure(rates[name])} per second`), line(`${name}_per_second`));
}

function verdict({level, code, text}, worst) {
  const title = level === "good" && worst !== "good" ? "Otherwise" : LEVELS[level] ?? level;
  const [page, state] = WHERE[code] ?? [];
  const link = page && h("a", {href: address(page, state)}, `See ${PAGE_NAMES[page]}`);
  return h(`li.verdict.${level}`, h("b", title), h("span", text, link && [" ", link]));
}

const PAGE_NAMES = {nodes: "the nodes", actors: "the actors", live: "how it went on", memory: "what is held"};

/** The page that says more of a finding, with its state. */
const WHERE = {
  no_node: ["nodes"], no_server: ["nodes"], node_down: ["nodes"], node_unready: ["nodes"], disk_full: ["nodes"], refused: ["nodes"],
  servers_missing: ["nodes"], proxies_missing: ["nodes"], no_inserts: ["actors", {sort: "last_seen"}], no_caches: ["nodes"],
  learner_behind: ["live"], samples_old: ["live"], models_behind: ["actors"], caches_rejected: ["actors", {sort: "rejected_caches"}],
  actors_gone: ["actors"], no_actors: ["actors"], actors_missing: ["actors", {sort: "last_seen"}], actors_silent: ["actors", {state: "silent"}], actors_idle: ["nodes"],
  learner_waits: ["live"], actors_ahead: ["live"], no_learner: ["nodes"], left_out: ["memory"], inserts_limited: ["memory"], draws_limited: ["memory"],
};

function card(question, answer, ...rest) {
  return h("section.card", h("h2", question), h("p.answer", answer), ...rest);
}

function learning({learning: found, totals}, line, {trend, former}) {
  const isKnown = found.return_mean !== null;
  const answer = isKnown ? `Episodes return ${figure(found.return_mean)} on average${trend && `, ${trend}`}` : "No episode has ended yet";
  const then = former && returnAt(former, totals.steps);
  const scalars = Object.entries({...found.client_scalars, ...found.learner_scalars}).slice(0, 4);
  return card("Does it learn?", answer, isKnown && line("return"), facts([
    former && [`${former.name} after as many steps`, then === null ? "had ended" : figure(then)],
    ["least … greatest return", isKnown ? `${figure(found.return_min)} … ${figure(found.return_max)}` : NONE],
    ["length of an episode", figure(found.length_mean)],
    ...scalars.map(([name, value]) => [words(name), figure(value)]),
  ].filter(Boolean)));
}

function waiting({rates, latency, learners, tables}) {
  const held = tables.flatMap((each) => [each.draws_wait, each.inserts_wait]).filter(Boolean);
  const learner = rates.waiting_share === null ? "Nobody learns now" : !rates.samples && rates.waiting_share < 0.5 ? "Nobody draws samples now" :
    `The learner waits ${share(rates.waiting_share)} of its time`;
  return card("Who waits for whom?", learner, ...held.map((text) => h("p", text)), facts([
    ["caches that actors had to skip", share(rates.skipped_share)],
    ["samples drawn", `${figure(rates.samples)} / s`],
    ["learners", count(learners.length)],
    ["batches that they took", count(learners.reduce((sum, each) => sum + each.batches, 0))],
    ["requests, median and 99 %", `${duration(latency.p50)}, ${duration(latency.p99)}`],
  ]));
}

function fresh({freshness, rates, tables}, line) {
  const isKnown = freshness.age_median !== null;
  const targets = [...new Set(tables.map((each) => each.samples_per_insert_target).filter(Boolean).map(figure))].join(", ");
  const answer = isKnown ? `Samples are ${duration(freshness.age_median)} old` : "No batch was drawn lately";
  return card("Is the data fresh?", answer, isKnown && line("sample_age_median"), facts([
    ["age of nine in ten, oldest", `${duration(freshness.age_p90)}, ${duration(freshness.age_max)}`],
    ["models behind the newest", `${figure(freshness.lag_mean)} (most ${figure(freshness.lag_max)})`],
    ["samples per insert", figure(rates.samples_per_insert) + (targets ? ` of ${targets}` : "")],
    ["weight that draws left out", share(freshness.left_out)],
    ["a batch is worth, of its size", share(freshness.effective)],
  ]));
}

function actors({actors: found, nodes}) {
  const missing = found.missing ? `, ${found.missing} of ${found.expected} missing` : "";
  const down = nodes.filter((node) => node.state !== "up");
  const link = (state) => h("a", {href: address("actors", {state})}, count(found[state]));
  return card("Who is missing?", `${count(found.active)} actors are active${missing}`, facts([
    ["active", link("active")],
    ...(found.idle ? [["of these, recorded nothing yet", count(found.idle)]] : []),
    ["silent", link("silent")],
    ...(found.lost ? [["lost", link("lost")]] : []),
    ["said goodbye", link("gone")],
    ["nodes that answer", `${nodes.length - down.length} of ${nodes.length}`],
    ...down.map((node) => [node.name || node.url, h(`span.state.${node.state}`, node.state)]),
  ]));
}

function room({forecast, totals, finished, rates, durable}) {
  const end = finished ? "The run is over" : forecast.goal !== null ? `Done in ${duration(forecast.goal)}` : "No goal was set";
  const part = totals.generated_bytes ? totals.received_bytes / totals.generated_bytes : null;
  return card("Will it run out, and when is it done?", end, facts([
    ["memory is full", until(forecast.memory_full, "now: the oldest makes room")],
    ["disk is full", until(forecast.disk_full, "now")],
    ["bytes sent", part === null ? NONE : partOf(part, "was generated")],
    ["arriving now", `${bytes(rates.received_bytes)} / s`],
    ["counts survive a crash", durable ? "yes" : "no (no state folder)"],
  ]));
}

function tableOf({tables}) {
  const columns = [
    {title: "Table", value: (row) => row.name},
    {title: "Storage", value: (row) => row.storage},
    {title: "Actors", value: (row) => count(row.clients), number: true},
    {title: "Held", value: (row) => count(row.held_caches), number: true},
    {title: "Bytes", value: (row) => bytes(row.held_bytes), number: true},
    {title: "Full", value: fullness},
    {title: "Samples drawn", value: (row) => count(row.samples), number: true},
    {title: "Unused", value: (row) => count(row.unused_samples), number: true},
    {title: "Overwritten", value: (row) => count(row.overwritten_caches), number: true},
  ];
  return tables.length ? table("Tables", columns, tables) : null;
}

function fullness(row) {
  if (row.full === null) return "no limit";
  const text = share(row.full);
  return h("progress", {max: 1, value: row.full, "aria-label": `${row.name} is ${text} full`, title: text});
}
