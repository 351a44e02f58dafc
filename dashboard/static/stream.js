// Stream of overviews: one a second, as server-sent events; polled if there is no stream. Its state is one of: connecting,
// live, paused, stale, recorded (a run from a file, which never changes).
import {at, get} from "./api.js";

const STALE_AFTER = 4000;
const RETRY_AFTER = 3000;

export class Stream extends EventTarget {
  #source = null;
  #retry = 0;
  #heard = 0;
  #paused = false;
  #isLost = false;
  newest = null;
  state = "connecting";

  constructor() {
    super();
    setInterval(() => this.#judge(), 1000);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.open()));
  }

  /** Time at which the newest overview arrived, in milliseconds since 1970; 0 if none has. */
  get heard() {
    return this.#heard;
  }

  get isPaused() {
    return this.#paused;
  }

  open() {
    if (this.#source || this.#paused || document.hidden) return;
    clearTimeout(this.#retry);
    this.#source = new EventSource(at("api/stream"));
    this.#source.addEventListener("overview", (event) => this.#take(JSON.parse(event.data)));
    this.#source.addEventListener("error", () => this.#failed());
  }

  pause(isPaused) {
    this.#paused = isPaused;
    if (isPaused) this.#close();
    else this.open();
    this.#judge();
  }

  #close() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #failed() {
    this.#isLost = true;
    this.#judge();
    if (this.#source?.readyState !== EventSource.CLOSED) return; // it tries again by itself
    this.#close();
    get("overview").then((overview) => this.#take(overview), () => {});
    this.#retry = setTimeout(() => this.open(), RETRY_AFTER);
  }

  #take(overview) {
    if (this.#paused) return;
    this.newest = overview;
    this.#heard = Date.now();
    this.#isLost = false;
    this.#judge();
    this.dispatchEvent(new CustomEvent("overview", {detail: overview}));
  }

  #judge() {
    const isOld = this.#isLost || Date.now() - this.#heard > STALE_AFTER;
    const state = this.newest?.recorded ? "recorded" : this.#paused ? "paused" : !this.#heard ? "connecting" : isOld ? "stale" : "live";
    if (state === this.state && state !== "stale") return;
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }
}
