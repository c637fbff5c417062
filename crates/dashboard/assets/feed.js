// The connection to the coordinator. `EventSource` cannot send a token, so the stream is read through fetch.

const TOKEN = "baton.token";
/** The coordinator says something at least every 10 s. */
const SILENCE_MS = 14_000;

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

/** A request to the coordinator with the token, if there is one. */
export const ask = (path, { headers = {}, ...options } = {}) => {
  const known = token.get();
  const all = known ? { ...headers, authorization: `Bearer ${known}` } : headers;
  return fetch(path, { ...options, headers: all, cache: "no-store", credentials: "omit", redirect: "error" });
};

/** What was wrong, in the coordinator's words. */
export const problemOf = async (response) => {
  try {
    return (await response.json()).error;
  } catch {
    return `the coordinator answered ${response.status}`;
  }
};

const pause = (millis) => new Promise((done) => setTimeout(done, millis));

export class Feed {
  /** `on` has a function for each name of an event, and: connected, lost, refused (waits for a token), anew. */
  constructor(on) {
    this.on = on;
    /** How far we have got, in the coordinator's terms. */
    this.last = null;
    this.lastWord = performance.now();
    this.since = this.lastWord;
    /** What the coordinator answered instead of a stream. */
    this.problem = null;
    this.failures = 0;
    setInterval(() => {
      if (performance.now() - this.since > SILENCE_MS) this.abort?.abort();
    }, 1000);
  }

  /** Begins from the start: it is another job. */
  anew() {
    this.last = null;
    this.on.anew();
    this.abort?.abort();
  }

  async run() {
    for (;;) {
      try {
        await this.connect();
      } catch {
        // Whatever it was, it is cured by trying again.
      }
      this.on.lost();
      await pause(Math.min(500 * 2 ** this.failures, 5000));
      this.failures += 1;
    }
  }

  /** Reads until the stream ends. */
  async connect() {
    this.abort = new AbortController();
    this.since = performance.now();
    const headers = this.last ? { "last-event-id": this.last } : {};
    const response = await ask("/api/stream?logs=1", { headers, signal: this.abort.signal });
    this.hear();
    if (response.status === 401 || response.status === 403) {
      await this.on.refused(await problemOf(response));
      this.failures = 0;
      return;
    }
    if (response.status === 400 && this.last) {
      // The cursor is that of another job.
      this.last = null;
      this.on.anew();
      return;
    }
    this.problem = response.ok ? null : await problemOf(response);
    if (!response.ok) return;
    this.failures = 0;
    this.on.connected();
    await this.read(response.body.getReader());
  }

  hear() {
    this.lastWord = performance.now();
    this.since = this.lastWord;
  }

  /** Seconds since the coordinator was last heard of. */
  silence() {
    return (performance.now() - this.lastWord) / 1000;
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      this.hear();
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        // What follows word of another job belongs to a connection that is given up.
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
