// The charts of a job, as the dashboard and the report show them.

import { Chart } from "./chart.js";
import { decimal, percent } from "./format.js";
import { show } from "./page.js";

const VALIDATED = ["training", "validation", "averaged weights"];
const step = (read) => (history) => history.curve(read);
const validation = (read) => (history) => history.evaluated(read);
const averaged = (read) => (history) => history.evaluated(({ ema }) => (ema ? read(ema) : NaN));

/** `curves` read the history; `isShown` chooses between classification and regression. */
const CHARTS = [
  {
    title: "Loss", series: VALIDATED, format: (it) => decimal(it), canLog: true,
    curves: [step((it) => it.loss), validation((it) => it.loss), averaged((it) => it.loss)],
  },
  {
    title: "Top-1 accuracy", series: VALIDATED, format: (it) => percent(it), fromZero: true,
    isShown: (history) => !history.isRegression(),
    curves: [step((it) => it.top1), validation((it) => it.top1), averaged((it) => it.top1)],
  },
  {
    title: "Correlation", series: ["Spearman", "Pearson"], format: (it) => decimal(it), fromZero: true,
    isShown: (history) => history.isRegression(),
    curves: [validation((it) => it.fit?.spearman), validation((it) => it.fit?.pearson)],
  },
  {
    title: "Learning rate", series: ["learning rate"], format: (it) => decimal(it, 4), fromZero: true,
    curves: [step((it) => it.lr)],
  },
  {
    title: "Samples per second", series: ["samples per second"], format: (it) => decimal(it, 0), fromZero: true,
    curves: [step((it) => it.samples_per_second)],
  },
];

/** Adds the charts to the page; a function that draws a history. */
export const addCharts = (parent) => {
  const charts = CHARTS.map((chart) => ({ ...chart, drawn: new Chart(parent, chart) }));
  return (history) => {
    for (const { drawn, curves, isShown } of charts) {
      show(drawn.figure, isShown?.(history) ?? true);
      drawn.draw(curves.map((curve) => curve(history)), history.marks);
    }
  };
};
