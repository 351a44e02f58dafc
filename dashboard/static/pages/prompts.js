// Prompts of language models: their states, the lease holders, dropped prompts, and the tokens of each rank.
import {fill, h, patch, svg} from "../dom.js";
import {count, duration, figure, NONE, share} from "../format.js";
import {term} from "../help.js";
import {makeOverTime} from "../overtime.js";
import {facts, table} from "../parts.js";

const STATES = ["waiting", "leased", "answered", "ready", "drawn", "committed", "dropped", "forgotten"];
const OPEN = STATES.slice(0, 5); // states of unfinished prompts
const IS_TABLE = /^prompts\.(.+)\.waiting$/;
const LONG = 600; // seconds after which a lease is highlighted
const [WIDTH, HEIGHT] = [1000, 28];

const HOLDERS = [
  {title: "Worker", value: ({worker}) => h("span.mono", {title: worker}, worker.slice(0, 8))},
  {title: "Leases", value: ({leases}) => count(leases), number: true},
  {title: "Oldest lease began", value: ({oldest}) => h(oldest > LONG ? "span.state.unready" : "span", `${duration(oldest)} ago`), number: true},
  {title: "Next lease ends", value: ({left}) => `in ${duration(left)}`, number: true},
  {title: "At", value: ({server}) => server || NONE},
];
const RANKS = [
  {title: "Rank", value: ({rank}) => String(rank), number: true},
  {title: "Tokens", value: ({tokens}) => figure(tokens), number: true},
  {title: "Share of the mean", value: ({part}) => share(part), number: true},
];
const REASONS = [
  {title: "Reason", value: ([reason]) => reason},
  {title: "Prompts", value: ([, many]) => count(many), number: true},
];

const CHARTS = [
  {title: "Unfinished prompts", unit: "by state", named: "PromptStats.waiting", format: count},
  {title: "Finished prompts", unit: "by state", named: "PromptStats.waiting", format: count},
  {title: "Oldest lease", named: "PromptStats.oldest_lease", format: duration},
  {title: "Models behind, newest step", unit: "versions", named: "PromptStats.lag"},
];

export function openPrompts(page) {
  const cards = h("div", h("p.quiet", "Loading …"));
  const linesOf = (names) => {
    const tables = names.map((name) => name.match(IS_TABLE)?.[1]).filter(Boolean);
    if (!tables.length && !page.stream.newest?.own.prompts?.length) return null;
    const titleOf = (each, one) => (tables.length > 1 ? `${each} ${one}`.trim() : one || each);
    return [OPEN, STATES.slice(5), ["oldest_lease"], ["lag"]].map((figures) => Object.fromEntries(
      tables.flatMap((each) => figures.map((one) => [`prompts.${each}.${one}`, titleOf(each, figures.length > 1 ? one : "")]))));
  };
  fill(page.root, cards, makeOverTime({kinds: CHARTS, linesOf, sync: "prompts"}, page));
  return {update: ({own}) => patch(cards, own.prompts?.length ? own.prompts.map(shown) : nothing())};
}

/** Cards of one table: a summary, its states as a bar, and the lease holders. */
function shown({table: name, figures}) {
  const row = {...figures, table: name};
  const {reasons, rank_tokens: tokens} = row;
  const holders = [...row.holders].sort((one, other) => other.leases - one.leases).slice(0, 32);
  const mean = tokens.reduce((sum, each) => sum + each, 0) / Math.max(1, tokens.length);
  const most = mean ? Math.max(...tokens) / mean : null;
  return h("div.prompts",
    h("section.card", h("h2", `Table ${row.table}`), h("p.answer", answerOf(row)), bar(row), facts([
      [term("PromptStats.waiting", "Prompts given"), count(row.given)],
      [term("PromptStats.holders", "Workers with a lease"), count(row.workers)],
      [term("PromptStats.oldest_lease"), row.workers ? duration(row.oldest_lease) : NONE],
      ["Leases that ended unfinished", count(row.expired)],
      ["Late answers, failed answers", `${count(row.late)}, ${count(row.failed)}`],
      [term("PromptStats.dead"), count(reasons["no signal"] ?? 0)],
      [term("PromptStats.replayable"), count(row.replayable)],
      ["Tokens drawn", figure(row.tokens_drawn)],
      [term("PromptStats.lag", "Models behind, newest step"), row.drawn || row.committed ? count(row.lag) : NONE],
      [term("PromptStats.rank_tokens", "Most tokens of a rank"), most === null ? NONE : `${share(most)} of the mean`],
    ])),
    h("div.grid.wide",
      holders.length && h("section.card", h("h2", term("PromptStats.holders")), table(`Workers with leases of ${row.table}`, HOLDERS, holders)),
      tokens.length > 1 && h("section.card", h("h2", term("PromptStats.rank_tokens")), table(`Tokens of each rank of ${row.table}`, RANKS, tokens.map((each, rank) => ({rank, tokens: each, part: mean ? each / mean : null})))),
      Object.keys(reasons).length > 0 && h("section.card", h("h2", term("PromptStats.reasons")),
        table(`Dropped prompts of ${row.table}`, REASONS, Object.entries(reasons).sort(([, one], [, other]) => other - one)))));
}

function answerOf({given, workers, ...states}) {
  if (!given) return "No prompt was given yet";
  const over = states.committed + states.dropped + states.forgotten;
  if (over === given) return `All ${count(given)} prompts are finished`;
  if (states.ready) return `${count(states.ready)} group${states.ready === 1 ? " is" : "s are"} ready to be drawn`;
  if (states.leased) return `No group is ready: ${count(workers)} worker${workers === 1 ? " answers" : "s answer"} ${count(states.leased)} prompt${states.leased === 1 ? "" : "s"}`;
  if (states.answered) return "No group is ready: answers lack a column, such as a reward";
  if (states.waiting) return "No group is ready, and no worker has a prompt";
  return "The trainer has drawn all groups";
}

/** The states side by side, as wide as their shares; a list below says the same in numbers. */
function bar({table: name, given, ...states}) {
  let left = 0;
  const parts = STATES.filter((state) => states[state]).map((state) => {
    const width = (WIDTH * states[state]) / Math.max(1, given);
    const part = svg("rect", {x: left, y: 0, width: Math.max(width, 1), height: HEIGHT, class: state}, titleOf(`${state}: ${count(states[state])}`));
    left += width;
    return part;
  });
  const frame = {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `States of the prompts of ${name}`};
  return h("div.states", svg("svg", frame, ...parts), h("ul", STATES.map((state) => h("li", h(`span.swatch.${state}`), `${state} `, h("b", count(states[state]))))));
}

function titleOf(text) {
  const title = svg("title");
  title.textContent = text;
  return title;
}

const nothing = () => h("section.card", h("h2", "No table stores prompts"),
  h("p", "A table with storage=\"prompts\" leases prompts to workers and hands groups of answers to trainers of language models, each once: docs/language-models.md. This page shows the states of its prompts."));
