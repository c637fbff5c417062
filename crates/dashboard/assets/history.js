// What the curves are drawn from: the numbers told so far, as far as they still count.

/** Beyond so many the older half is thinned out: no screen is that wide. */
const MOST = 4000;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    this.evaluations = [];
    /** Where training began or went on. */
    this.marks = [];
  }

  add({ step, evaluation, began_at: begin, generation }) {
    if (typeof begin === "number") {
      // Later updates were lost or taken back, and are made again.
      const counts = (told) => told.step <= begin;
      this.steps = this.steps.filter(counts);
      this.evaluations = this.evaluations.filter(counts);
      this.marks = this.marks.filter((mark) => mark.step < begin);
      this.marks.push({ step: begin, generation });
    }
    if (step) {
      this.steps.push(step);
      if (this.steps.length > MOST) {
        const half = MOST / 2;
        // Of two neighbours the one with the greater loss, so that spikes stay.
        const older = [];
        for (let at = 0; at < half; at += 2) older.push(this.steps[this.steps[at].loss > this.steps[at + 1].loss ? at : at + 1]);
        this.steps = older.concat(this.steps.slice(half));
      }
    }
    if (evaluation) this.evaluations.push(evaluation);
  }

  /** Pairs of update and value for a curve. */
  curve(value) {
    return this.steps.map((step) => [step.step, value(step)]);
  }

  /** Of the whole set: a part of it is another measure. */
  evaluated(value) {
    return this.evaluations.filter(({ extent }) => extent !== "subset")
      .map((evaluation) => [evaluation.step, value(evaluation)])
      .filter(([, found]) => Number.isFinite(found));
  }

  /** Those of the newest evaluation; before the first one, of the newest update. */
  metrics() {
    return (this.evaluations.at(-1) ?? this.steps.at(-1))?.metrics ?? [];
  }
}
