// Log lines of all actors: search, filters, live tail with pause, the neighbours of a line, and a link to each line.
import {get} from "../api.js";
import {fill, h, say} from "../dom.js";
import {clock, count} from "../format.js";
import {choice, empty, every, problem, routed, searchField} from "../parts.js";
import {address, remember} from "../router.js";

const PAGE = 200;
const MOST = 2000; // lines on the page: older ones are removed while it follows
const AGES = [["", "any time"], ["300", "last 5 minutes"], ["3600", "last hour"], ["86400", "last day"]];

export function openLogs({root, parameters, stream, signal}) {
  const route = routed(signal, (state, own) => new Logs(root, Object.fromEntries(state), stream, own));
  route(parameters);
  return {route};
}

class Logs {
  #older = "";
  #newer = "";
  #asked = new AbortController(); // aborted by the next search, for which its answer would come too late

  constructor(root, state, stream, signal) {
    this.state = {text: "", label: "", age: "", server: "", line: "", ...state};
    this.stream = stream;
    signal.addEventListener("abort", () => this.#asked.abort());
    this.isFollowing = !this.state.line;
    this.list = h("ol.lines", {tabindex: "0", "aria-label": "Log lines, the newest below",
      scroll: () => this.#scrolled()});
    this.message = h("span.quiet", {role: "status"});
    this.follow = h("button", {type: "button", click: () => this.#setFollowing(!this.isFollowing)}, "Follow");
    this.more = h("button", {type: "button", click: () => this.#showOlder()}, "Older lines");
    fill(root, this.#bar(), this.list);
    this.#search();
    every(1, signal, stream, () => this.isFollowing && this.#newer && this.#tail());
  }

  #bar() {
    const {state} = this;
    const label = h("input", {placeholder: "Actor", "aria-label": "Label of an actor, as shown before its lines", size: 9,
      maxlength: 8, pattern: "[0-9a-f]*", value: state.label, spellcheck: "false",
      change: () => this.#change({label: label.value.trim().toLowerCase()})});
    return h("div.bar",
      searchField("Search all lines", state.text, (text) => this.#change({text})), label,
      choice("Age", AGES, state.age, (age) => this.#change({age})),
      this.follow, this.more,
      h("button", {type: "button", click: () => this.#download()}, "Download"), this.message);
  }

  #change(changes) {
    Object.assign(this.state, changes, {line: ""});
    remember({...this.state, server: ""});
    this.isFollowing = true;
    this.#search();
  }

  #filters() {
    const {text, label, age} = this.state;
    return {text, label, since: age ? Date.now() / 1000 - Number(age) : null, limit: PAGE};
  }

  async #search() {
    this.#asked.abort();
    this.#asked = new AbortController();
    this.follow.setAttribute("aria-pressed", String(this.isFollowing));
    try {
      if (this.state.line) await this.#around(this.state.line);
      else await this.#newest();
    } catch (error) {
      if (error.name !== "AbortError") fill(this.list, h("li", problem(error)));
    }
  }

  async #newest() {
    const page = await get("logs", this.#filters(), this.#asked.signal);
    this.#older = page.older;
    this.#newer = page.newer;
    fill(this.list, page.rows.toReversed().map((row) => this.#line(row)));
    if (!page.rows.length) fill(this.list, h("li", empty(this.#nothing())));
    this.#tell(page);
    this.list.scrollTop = this.list.scrollHeight;
    this.follow.disabled = false;
  }

  #nothing() {
    const {text, label, age} = this.state;
    return text || label || age ? "No line matches. Shorten the search, or remove a filter." :
      "No actor has logged anything in this run yet: client.log(\"...\") sends a line.";
  }

  /** Show the lines before and after one line, "index@server". */
  async #around(line) {
    const [index, server] = [Number.parseInt(line, 10), line.slice(line.indexOf("@") + 1)];
    const ask = (from, direction) => {
      const cursor = `${from}@${encodeURIComponent(server)}`;
      return get("logs", {server, cursor, direction, limit: 50}, this.#asked.signal);
    };
    const [before, after] = await Promise.all([ask(index + 1, "older"), ask(index, "newer")]);
    this.#older = before.older;
    const rows = [...after.rows, ...before.rows].toReversed();
    fill(this.list, rows.map((row) => this.#line(row)));
    this.follow.disabled = true;
    say(this.message, `Lines around one line of ${server}. `);
    this.message.append(h("a", {href: address("logs")}, "All lines"));
    this.list.querySelector(".here")?.scrollIntoView({block: "center"});
  }

  async #tail() {
    const page = await get("logs", {...this.#filters(), since: null, cursor: this.#newer, direction: "newer"}, this.#asked.signal);
    this.#newer = page.newer;
    if (!page.rows.length || !this.isFollowing) return;
    this.list.querySelector(".empty")?.parentElement.remove();
    this.list.append(...page.rows.toReversed().map((row) => this.#line(row)));
    while (this.list.childElementCount > MOST) this.list.firstElementChild.remove();
    this.list.scrollTop = this.list.scrollHeight;
    this.#tell(page);
  }

  async #showOlder() {
    try {
      await this.#back();
    } catch (error) {
      if (error.name !== "AbortError") say(this.message, error.message);
    }
  }

  async #back() {
    const {list} = this;
    const server = this.state.line ? this.state.server : "";
    const page = await get("logs", {...this.#filters(), server, cursor: this.#older, direction: "older"}, this.#asked.signal);
    this.#older = page.older;
    this.#setFollowing(false);
    const height = list.scrollHeight;
    list.prepend(...page.rows.toReversed().map((row) => this.#line(row)));
    list.scrollTop += list.scrollHeight - height;
    this.more.disabled = !page.more;
    this.#tell(page);
  }

  #tell(page) {
    const missing = page.missing.length ? `; ${page.missing.join(", ")} did not answer` : "";
    say(this.message, `${count(this.list.querySelectorAll("time").length)} lines shown${missing}`);
  }

  #setFollowing(isFollowing) {
    if (this.isFollowing === isFollowing || this.state.line) return;
    this.isFollowing = isFollowing;
    this.follow.setAttribute("aria-pressed", String(isFollowing));
    if (isFollowing) this.#search();
  }

  /** Pause the tail while the reader scrolls up. */
  #scrolled() {
    const {scrollHeight, scrollTop, clientHeight} = this.list;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
    if (!isAtEnd && this.isFollowing) this.#setFollowing(false);
  }

  #line(row) {
    const id = `${row.index}@${row.server}`;
    const link = address("logs", {line: id, server: row.server});
    return h(id === this.state.line ? "li.here" : "li",
      h("a", {href: link, title: `${row.server}, line ${row.index}: show its neighbours`}, h("time", clock(row.received))),
      h("a.label", {href: address("actors", {id: row.client}), title: `The actor ${row.label}`}, row.name || row.label),
      h("span.text", highlighted(row.text, this.state.text)));
  }

  /** Save the lines on the page as a file. */
  #download() {
    const lines = [...this.list.querySelectorAll("li")].map((line) => [...line.children].map((part) => part.textContent).join(" "));
    const url = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], {type: "text/plain"}));
    h("a", {href: url, download: "memoire-log.txt"}).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}

/** Pieces of a text, with the searched text marked. */
function highlighted(text, wanted) {
  if (!wanted) return [text];
  const pieces = [];
  const [low, key] = [text.toLowerCase(), wanted.toLowerCase()];
  let from = 0;
  for (let at = low.indexOf(key); at >= 0; at = low.indexOf(key, from)) {
    pieces.push(text.slice(from, at), h("mark", text.slice(at, at + key.length)));
    from = at + key.length;
  }
  return [...pieces, text.slice(from)];
}
