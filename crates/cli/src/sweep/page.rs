//! The results of a sweep as a web page that loads nothing: the table, and a curve for each trial.

use super::table::{SweepResults, folder_name};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 320.0;
/// Space for the labels of the axes.
const MARGIN: f64 = 60.0;

const PAGE_STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem; text-align: left; border-bottom: 1px solid #8884; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: currentColor; }
polyline { fill: none; stroke-width: 1.5; }
polyline:hover { stroke-width: 4; }
";

/// The page. It is written anew whenever a trial ends.
pub(super) fn html(results: &SweepResults) -> String {
    let name = escaped(&results.name);
    let cells = |tag: &str, row: Vec<String>| {
        let cells = row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let rows: String = results.rows().into_iter().map(|row| cells("td", row)).collect();
    let trials: String = (0..results.trials.len()).map(|number| trial(results, number)).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>Sweep of {name}</title>\n<style>\n{PAGE_STYLE}</style>\n</head>\n<body>\n<h1>Sweep of {name}</h1>\n\
         <p>{}</p>\n<table>\n{}{rows}</table>\n{}<h2>Trials</h2>\n<table>\n{trials}</table>\n</body>\n</html>\n",
        escaped(&results.cost()),
        cells("th", results.header()),
        curves(results),
    )
}

/// A row of the table of trials, with a link to the report of its run.
fn trial(results: &SweepResults, number: usize) -> String {
    let (folder, trial) = (folder_name(number), &results.trials[number]);
    format!(
        "<tr><td><a href=\"{folder}/report.html\">{folder}</a></td><td>{}</td><td>{}</td></tr>\n",
        escaped(&trial.label()),
        escaped(&trial.state)
    )
}

/// The metric of all evaluations over the steps.
fn curves(results: &SweepResults) -> String {
    let points = || {
        results.trials.iter().flat_map(|trial| &trial.curve).filter(|(_, value)| value.is_finite())
    };
    let values = points().map(|(_, value)| *value);
    let (low, high) =
        values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
    let last = points().map(|(step, _)| *step).max().unwrap_or(0).max(1);
    let Some(metric) = results.metric().filter(|_| low <= high) else { return String::new() };
    let span = if high > low { high - low } else { 1.0 };
    let x = |step: u64| MARGIN + (WIDTH - 2.0 * MARGIN) * step as f64 / last as f64;
    let y = |value: f64| HEIGHT - 30.0 - (HEIGHT - 50.0) * (value - low) / span;
    let count = results.trials.len().max(1);
    let mut svg = format!(
        "<h2>{}</h2>\n<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n",
        escaped(&metric.name)
    );
    for (number, trial) in results.trials.iter().enumerate() {
        let points = trial.curve.iter().filter(|(_, value)| value.is_finite());
        let points = points.map(|(step, value)| format!("{:.1},{:.1}", x(*step), y(*value)));
        let hue = 360 * number / count;
        svg += &format!(
            "<polyline points=\"{}\" stroke=\"hsl({hue} 70% 45%)\"><title>{} {}</title></polyline>\n",
            points.collect::<Vec<_>>().join(" "),
            folder_name(number),
            escaped(&trial.label())
        );
    }
    for value in [low, high] {
        svg += &format!("<text x=\"4\" y=\"{:.1}\">{value:.4}</text>\n", y(value) + 4.0);
    }
    svg += &format!(
        "<text x=\"{:.1}\" y=\"{}\">step {last}</text>\n</svg>\n",
        x(last) - 30.0,
        HEIGHT - 8.0
    );
    svg
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}
