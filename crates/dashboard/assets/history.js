// The metric points received so far, without invalidated ones.

/** Most steps kept; with more, all are thinned out evenly. No screen is that wide. */
const MAX_STEPS = 4000;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    /**
     * Of every range of this many steps the one with the greatest loss is kept, so that spikes remain, and also the first and
     * the newest step of all. A power of two, so that thinning out twice gives the same as thinning out once.
     */
    this.stride = 1;
    this.evaluations = [];
    /** Where training started or resumed. */
    this.marks = [];
  }

  add({ step, evaluation, began_at: begin, generation }) {
    if (typeof begin === "number") {
      // Later steps were lost or rolled back, and are repeated.
      const isValid = (point) => point.step <= begin;
      this.steps = this.steps.filter(isValid);
      if (this.steps.length === 0) this.stride = 1;
      this.evaluations = this.evaluations.filter(isValid);
      this.marks = this.marks.filter((mark) => mark.step < begin);
      this.marks.push({ step: begin, generation });
    }
    if (step) {
      this.addStep(step);
      while (this.steps.length > MAX_STEPS) {
        this.stride *= 2;
        const all = this.steps;
        this.steps = [];
        all.forEach((kept) => this.addStep(kept));
      }
    }
    if (evaluation) this.evaluations.push(evaluation);
  }

  addStep(step) {
    const [before, last] = this.steps.slice(-2);
    const range = (point) => Math.floor(point.step / this.stride);
    // The previous newest step may have been kept only because it was the newest.
    if (this.steps.length > 2 && range(before) === range(last)) this.steps.splice(before.loss >= last.loss ? -1 : -2, 1);
    this.steps.push(step);
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
