// Frame around the pages: login, navigation, theme, live state, keys.
import {get, post} from "./api.js";
import {fill, h, patch, say} from "./dom.js";
import {clock, duration} from "./format.js";
import {startHelp} from "./help.js";
import {here} from "./router.js";
import {Stream} from "./stream.js";
import {startTheme} from "./theme.js";
import {PAGES} from "./pages/index.js";

const $ = (id) => document.getElementById(id);
const content = $("content");
const stream = new Stream();
let current = null; // {name, page, abort}

function showPage() {
  const {page: name, parameters} = here();
  if (!PAGES[name]) return showUnknown(name);
  if (current?.name === name && current.page.route) return current.page.route(parameters);
  leave();
  const abort = new AbortController();
  const root = h("div.page");
  fill(content, h("h1", PAGES[name].title), root);
  const page = PAGES[name].open({root, parameters, stream, signal: abort.signal}) ?? {};
  current = {name, page, abort};
  document.title = `${PAGES[name].title} · memoire`;
  markNavigation(name);
  if (stream.newest) page.update?.(stream.newest);
}

function leave() {
  current?.abort.abort();
  current?.page.close?.();
  current = null;
}

function showUnknown(name) {
  leave();
  markNavigation("");
  const text = `There is no page “${name}”. The pages are in the list above.`;
  fill(content, h("h1", "No such page"), h("p", text));
}

function markNavigation(name) {
  for (const link of $("nav").querySelectorAll("a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  say($("menu"), PAGES[name]?.title ?? "Pages");
  showMenu(false);
}

/** On a phone the list of pages is behind a button with the name of the page that is shown. */
function showMenu(isOpen) {
  $("menu").setAttribute("aria-expanded", String(isOpen));
  document.querySelector(".top").dataset.menu = isOpen ? "open" : "closed";
}

function startMenu() {
  $("menu").addEventListener("click", () => showMenu($("menu").getAttribute("aria-expanded") !== "true"));
  $("nav").addEventListener("click", (event) => event.target.closest("a") && showMenu(false));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || $("menu").getAttribute("aria-expanded") !== "true") return;
    showMenu(false);
    $("menu").focus();
  });
}

function showLogin(problem = "") {
  leave();
  document.body.dataset.state = "login";
  stream.pause(true);
  const token = h("input", {type: "password", id: "token", autocomplete: "current-password", required: true});
  const message = h("p.problem", {role: "alert"}, problem);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post("login", {token: token.value});
      stream.pause(false);
      start();
    } catch (error) {
      say(message, error.message);
      token.select();
    }
  };
  const hint = "The token is in the file that --token-file of the dashboard names.";
  fill(content, h("h1", "Log in"), h("form.card.login", {submit},
    h("label", {for: "token"}, "Token"), token, h("button.primary", {type: "submit"}, "Log in"), message,
    h("p.quiet", hint)));
  token.focus();
}

function showLive() {
  const since = stream.heard ? clock(stream.heard / 1000) : "";
  const texts = {
    live: "live",
    paused: since ? `paused at ${since}` : "paused",
    stale: `stale for ${duration((Date.now() - stream.heard) / 1000)}`,
    connecting: "connecting",
    recorded: `exported ${clock(stream.newest?.recorded)}`,
  };
  const button = $("live");
  button.dataset.state = stream.state;
  button.setAttribute("aria-pressed", String(stream.isPaused));
  say(button, texts[stream.state]);
  $("gone").hidden = stream.state !== "stale";
  say($("gone"), stream.state === "stale" ? `The dashboard does not answer. This page shows its state at ${since} and updates when the dashboard answers again.` : "");
}

/** Show on every page, in one line, that some addresses are open; the addresses and the remedy unfold. */
function showOpen(addresses) {
  $("open").hidden = addresses.length === 0;
  const text = addresses.length === 1 ? "One address is open to everybody" : `${addresses.length} addresses are open to everybody`;
  patch($("open"), h("details", h("summary", text), h("ul", addresses.map((each) => h("li.mono", each))),
    h("p", "Everybody who can reach them can read or write. Keys (--keys) protect the nodes' addresses, and a token (--http-token-file, " +
      "--token-file) protects their pages: docs/security.md.")));
}

function startKeys(nextTheme) {
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea");
    if (event.key === "Escape" && isTyping) event.target.blur();
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "t") nextTheme();
    if (event.key === "p") stream.pause(!stream.isPaused);
    if (event.key === "/") {
      event.preventDefault();
      const search = content.querySelector("input[type=search]");
      if (search) search.focus();
      else location.hash = "#/logs";
    }
  });
}

async function start() {
  try {
    const session = await get("session");
    say($("software"), session.software);
    $("logout").hidden = !session.needs_token || !session.is_let_in;
    if (!session.is_let_in) return showLogin();
    delete document.body.dataset.state;
  } catch (error) {
    const again = h("button", {type: "button", click: start}, "Try again");
    return fill(content, h("h1", "No answer"), h("p.problem", {role: "alert"}, error.message), again);
  }
  stream.open();
  showPage();
}

fill($("nav"), Object.entries(PAGES).filter(([, {isHidden}]) => !isHidden).map(([name, {title}]) => h("a", {href: `#/${name}`, "data-page": name}, title)));
startKeys(startTheme($("theme")));
startMenu();
startHelp();
$("live").addEventListener("click", () => stream.pause(!stream.isPaused));
$("logout").addEventListener("click", async () => {
  leave(); // first, because later requests of the page would be refused
  stream.pause(true);
  await post("logout").catch(() => stream.pause(false));
  start();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  content.focus();
});
document.addEventListener("memoire:login", () => showLogin("Log in to continue."));
stream.addEventListener("state", showLive);
stream.addEventListener("overview", ({detail}) => {
  say($("run"), detail.run);
  showOpen(detail.open);
  current?.page.update?.(detail);
});
addEventListener("hashchange", showPage);
start();
