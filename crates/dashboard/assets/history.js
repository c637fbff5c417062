// The metric points received so far, without invalidated ones.

/** Most steps kept; with more, the older half is thinned out. No screen is that wide. */
const MAX_STEPS = 4000;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    this.evaluations = [];
    /** Where training started or resumed. */
    this.marks = [];
  }

  add({ step, evaluation, began_at: begin, generation }) {
    if (typeof begin === "number") {
      // Later steps were lost or rolled back, and are repeated.
      const isValid = (point) => point.step <= begin;
      this.steps = this.steps.filter(isValid);
      this.evaluations = this.evaluations.filter(isValid);
      this.marks = this.marks.filter((mark) => mark.step < begin);
      this.marks.push({ step: begin, generation });
    }
    if (step) {
      this.steps.push(step);
      if (this.steps.length > MAX_STEPS) {
        const half = MAX_STEPS / 2;
        // Keep the one with the greater loss of each pair, so that spikes remain.
        const older = [];
        for (let at = 0; at < half; at += 2) older.push(this.steps[this.steps[at].loss > this.steps[at + 1].loss ? at : at + 1]);
        this.steps = older.concat(this.steps.slice(half));
      }
    }
    if (evaluation) this.evaluations.push(evaluation);
  }

  /** Pairs of step and value for a curve. */
  curve(value) {
    return this.steps.map((step) => [step.step, value(step)]);
  }

  /** Pairs of step and value of evaluations on the whole set; those on a subset are not comparable. */
  evaluated(value) {
    return this.evaluations.filter(({ extent }) => extent !== "subset")
      .map((evaluation) => [evaluation.step, value(evaluation)])
      .filter(([, found]) => Number.isFinite(found));
  }

  /** Metrics of the newest evaluation; before the first one, of the newest step. */
  metrics() {
    return (this.evaluations.at(-1) ?? this.steps.at(-1))?.metrics ?? [];
  }
}
