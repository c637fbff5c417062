// The connection to the coordinator. `EventSource` cannot send a token, so the stream is read with `fetch`.

const TOKEN_KEY = "baton.token";
/** Without data for this long, the connection is closed, ms. The coordinator sends data at least every 10 s. */
const STREAM_TIMEOUT_MS = 14_000;

export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY),
  set: (value) => sessionStorage.setItem(TOKEN_KEY, value),
  forget: () => sessionStorage.removeItem(TOKEN_KEY),
};

/** A request to the coordinator with the token, if there is one. */
export const ask = (path, { headers = {}, ...options } = {}) => {
  const storedToken = token.get();
  const all = storedToken ? { ...headers, authorization: `Bearer ${storedToken}` } : headers;
  return fetch(path, { ...options, headers: all, cache: "no-store", credentials: "omit", redirect: "error" });
};

/** The coordinator's error message in a response. */
export const problemOf = async (response) => {
  try {
    return (await response.json()).error;
  } catch {
    return `the coordinator answered ${response.status}`;
  }
};

const sleep = (millis) => new Promise((done) => setTimeout(done, millis));

export class Feed {
  /** `on` has a handler for each event name, and the handlers connected, lost, refused (waits for a token) and reset. */
  constructor(on) {
    this.on = on;
    /** Id of the last event, from which a new connection continues. */
    this.last = null;
    this.lastDataAt = performance.now();
    /** When the last data arrived or the current connection attempt began. */
    this.since = this.lastDataAt;
    /** The error that the coordinator sent instead of a stream. */
    this.problem = null;
    this.failures = 0;
    setInterval(() => {
      if (performance.now() - this.since > STREAM_TIMEOUT_MS) this.abort?.abort();
    }, 1000);
  }

  /** Starts again from the beginning, for another job. */
  reset() {
    this.last = null;
    this.on.reset();
    this.abort?.abort();
  }

  async run() {
    for (;;) {
      try {
        await this.connect();
      } catch {
        // Retry after any error.
      }
      this.on.lost();
      await sleep(Math.min(500 * 2 ** this.failures, 5000));
      this.failures += 1;
    }
  }

  /** Reads until the stream ends. */
  async connect() {
    this.abort = new AbortController();
    this.since = performance.now();
    const headers = this.last ? { "last-event-id": this.last } : {};
    const response = await ask("/api/stream?logs=1", { headers, signal: this.abort.signal });
    this.noteData();
    // A 403 without a token asks for no token: its message is shown like that of any other error.
    if (response.status === 401 || (response.status === 403 && token.get())) {
      await this.on.refused(await problemOf(response));
      this.failures = 0;
      return;
    }
    if (response.status === 400 && this.last) {
      // The id is from another job.
      this.last = null;
      this.on.reset();
      return;
    }
    this.problem = response.ok ? null : await problemOf(response);
    if (!response.ok) return;
    this.failures = 0;
    this.on.connected();
    await this.read(response.body.getReader());
  }

  noteData() {
    this.lastDataAt = performance.now();
    this.since = this.lastDataAt;
  }

  /** Time since the last data from the coordinator, seconds. */
  secondsSinceData() {
    return (performance.now() - this.lastDataAt) / 1000;
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      this.noteData();
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        // A handler may have reset the feed: skip the rest of the aborted connection.
        if (this.abort.signal.aborted) return;
        this.take(block);
      }
    }
  }

  take(block) {
    let [name, data, id] = ["", "", null];
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
      else if (line.startsWith("id: ")) id = line.slice(4);
    }
    if (id) this.last = id;
    if (data) this.on[name]?.(JSON.parse(data));
  }
}
