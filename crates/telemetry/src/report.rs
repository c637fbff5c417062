//! The report of a job, at its end or at any time before: as one HTML file that needs nothing else, no script and no
//! network, and as JSON with the same data.

use std::{
    fmt::Write,
    time::{Duration, UNIX_EPOCH},
};

use baton_proto::v1::{
    Accuracy, EvaluatedStep, Extent, GetStatusResponse, Recovery, Spending, Step,
    StreamMetricsResponse, WatchEventsResponse, stream_metrics_response::Metrics,
};
use baton_recipe::median;
use serde::Serialize;

use crate::curves::{Chart, Mark, Series, escape, short, svg};

/// The most rows of a table; the newest are shown.
const MOST_ROWS: usize = 200;

/// What a report is made of.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The status.
    pub status: GetStatusResponse,
    /// The numbers of the job's whole life, oldest first.
    pub points: Vec<StreamMetricsResponse>,
    /// Its events, oldest first.
    pub events: Vec<WatchEventsResponse>,
    /// The recipe, with every value.
    pub recipe_toml: String,
}

/// The report as JSON, a promise to scripts as on the command line.
#[derive(Debug, Serialize)]
struct Content<'a> {
    status: &'a GetStatusResponse,
    points: &'a [StreamMetricsResponse],
    events: &'a [WatchEventsResponse],
    recipe_toml: &'a str,
}

/// The report as JSON: `status`, `points` and `events` as on the command line, and `recipe_toml`.
///
/// # Errors
///
/// None that is known of.
pub fn json(report: &Report) -> Result<String, serde_json::Error> {
    let mut text = serde_json::to_string_pretty(&Content {
        status: &report.status,
        points: &report.points,
        events: &report.events,
        recipe_toml: &report.recipe_toml,
    })?;
    text.push('\n');
    Ok(text)
}

/// The report as an HTML page.
#[must_use]
pub fn html(report: &Report) -> String {
    let status = &report.status;
    let mut page = Page::default();
    let name = if status.name.is_empty() { "A job without a name" } else { &status.name };
    let _ = write!(
        page.text,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{name}: {state}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>{name}</h1>\n<p class=\"state\"><strong>{state}</strong>{reason}</p>\n\
         <p class=\"small\">Job {job}, generation {generation}, Baton {version}</p>\n",
        name = escape(name),
        state = escape(&state(status)),
        reason = escape(&reason(status)),
        job = escape(&status.job_id),
        generation = status.generation,
        version = escape(&status.coordinator_version),
        STYLE = include_str!("report/style.css"),
    );
    page.figures(&figures(status));
    page.text.push_str("<section class=\"charts\">\n");
    for chart in charts(&report.points) {
        let _ = write!(page.text, "<figure>\n{}</figure>\n", svg(&chart));
    }
    page.text.push_str(
        "</section>\n<p class=\"small\">A dotted vertical line: a generation began there.</p>\n",
    );
    evaluations(&mut page, &report.points);
    recoveries(&mut page, status);
    divergences(&mut page, status);
    events(&mut page, &report.events);
    ranks(&mut page, status);
    let recipe = escape(&report.recipe_toml);
    let _ = write!(
        page.text,
        "<h2>Recipe</h2>\n<pre tabindex=\"0\">{recipe}</pre>\n</main>\n</body>\n</html>\n"
    );
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn figures(&mut self, figures: &[(&str, String)]) {
        self.text.push_str("<dl class=\"figures\">\n");
        for (name, value) in figures {
            let (name, value) = (escape(name), escape(value));
            let _ = writeln!(self.text, "<div><dt>{name}</dt><dd>{value}</dd></div>");
        }
        self.text.push_str("</dl>\n");
    }

    /// A table of the newest rows, which come last; `none` where there are none.
    fn table(&mut self, title: &str, none: &str, heads: &[&str], rows: &[Vec<String>]) {
        let _ = writeln!(self.text, "<h2>{}</h2>", escape(title));
        if rows.is_empty() {
            let _ = writeln!(self.text, "<p>{}</p>", escape(none));
            return;
        }
        let shown = &rows[rows.len().saturating_sub(MOST_ROWS)..];
        if shown.len() < rows.len() {
            let _ = writeln!(self.text, "<p>The newest {} of {}.</p>", shown.len(), rows.len());
        }
        let _ = write!(
            self.text,
            "<div class=\"scroll\" role=\"region\" aria-label=\"{}\" tabindex=\"0\">\n<table>\n<thead><tr>",
            escape(title)
        );
        for head in heads {
            let _ = write!(self.text, "<th scope=\"col\">{}</th>", escape(head));
        }
        self.text.push_str("</tr></thead>\n<tbody>\n");
        for row in shown {
            self.text.push_str("<tr>");
            for cell in row {
                // Numbers stay in one line, words do not.
                let class = if cell.len() > 30 { " class=\"words\"" } else { "" };
                let _ = write!(self.text, "<td{class}>{}</td>", escape(cell));
            }
            self.text.push_str("</tr>\n");
        }
        self.text.push_str("</tbody>\n</table>\n</div>\n");
    }
}

/// How it ended, or what it does.
fn state(status: &GetStatusResponse) -> String {
    let name = match &status.outcome {
        Some(outcome) => outcome.kind().name(),
        None => status.phase().name(),
    };
    name.replace('_', " ")
}

fn reason(status: &GetStatusResponse) -> String {
    let reason = match &status.outcome {
        Some(outcome) => outcome.why().unwrap_or_default(),
        None => status.reason.clone(),
    };
    if reason.is_empty() { reason } else { format!(": {reason}") }
}

/// The share of the time that machines were paid for in which training went on; none before the first of it.
#[must_use]
pub fn goodput(spending: &Spending) -> Option<f64> {
    let lost = spending.interruption_hours + spending.paused_hours;
    (spending.hours > 0.0).then(|| (1.0 - lost / spending.hours).clamp(0.0, 1.0))
}

/// The median of whole recoveries, in seconds.
fn median_recovery(recoveries: &[Recovery]) -> Option<f64> {
    median(recoveries.iter().filter_map(|one| one.total_seconds))
}

fn figures(status: &GetStatusResponse) -> Vec<(&'static str, String)> {
    let spending = status.spending.unwrap_or_default();
    let mut figures = vec![("Machine time", duration(spending.hours * 3_600.0))];
    figures.extend(spending.dollars.map(|dollars| ("Cost", money(dollars))));
    figures.extend(status.latest.as_ref().map(|step| {
        (
            "Progress",
            format!(
                "{} of {} steps, {} of {} epochs",
                step.step, step.total_steps, step.epoch, status.epochs
            ),
        )
    }));
    figures.extend(best(status.best.as_ref()));
    figures.extend(goodput(&spending).map(|share| ("Goodput", percent(share))));
    let lost = duration(spending.interruption_hours * 3_600.0);
    let cost = spending.interruption_dollars.map(|dollars| format!(", {}", money(dollars)));
    figures.push(("Interruptions", lost + &cost.unwrap_or_default()));
    if spending.paused_hours > 0.0 {
        figures.push(("Paused", duration(spending.paused_hours * 3_600.0)));
    }
    figures.push(("Recoveries", status.recoveries_total.to_string()));
    figures.extend(
        median_recovery(&status.recoveries).map(|median| ("Median recovery", duration(median))),
    );
    figures
}

fn best(best: Option<&EvaluatedStep>) -> Option<(&'static str, String)> {
    let best = best?;
    let accuracy = best.accuracy.as_ref()?;
    Some(match accuracy.fit {
        Some(fit) => ("Best Spearman", format!("{} at step {}", short(fit.spearman), best.step)),
        None => ("Best top-1", format!("{} at step {}", percent(accuracy.top1), best.step)),
    })
}

fn steps(points: &[StreamMetricsResponse]) -> impl Iterator<Item = &Step> {
    points.iter().filter_map(|point| match &point.metrics {
        Some(Metrics::Step(step)) => Some(step),
        _ => None,
    })
}

fn evaluated(points: &[StreamMetricsResponse]) -> impl Iterator<Item = &EvaluatedStep> {
    points.iter().filter_map(|point| match &point.metrics {
        Some(Metrics::Evaluation(evaluated)) => Some(evaluated),
        _ => None,
    })
}

fn is_regression(points: &[StreamMetricsResponse]) -> bool {
    evaluated(points).any(|one| one.accuracy.is_some_and(|accuracy| accuracy.fit.is_some()))
}

fn charts(points: &[StreamMetricsResponse]) -> [Chart; 4] {
    let updates = |name: &str, read: fn(&Step) -> f64| Series {
        name: name.to_owned(),
        points: steps(points).map(|step| (step.step as f64, read(step))).collect(),
    };
    // A quick look at a part of the validation set is another measure; the table has it.
    let full = || evaluated(points).filter(|one| one.extent() != Extent::Subset);
    let found = |name: &str, averaged: bool, read: fn(&Accuracy) -> Option<f64>| Series {
        name: name.to_owned(),
        points: full()
            .filter_map(|one| {
                let accuracy = if averaged { &one.ema } else { &one.accuracy };
                Some((one.step as f64, read(accuracy.as_ref()?)?))
            })
            .collect(),
    };
    let marks: Vec<Mark> = points
        .iter()
        .filter_map(|point| match point.metrics {
            Some(Metrics::BeganAt(step)) => Some(Mark {
                x: step as f64,
                title: format!("generation {} from step {step}", point.generation),
            }),
            _ => None,
        })
        .collect();
    let chart = |title: &str, y_title: &str, series| Chart {
        title: title.to_owned(),
        x_title: "step".to_owned(),
        y_title: y_title.to_owned(),
        series,
        marks: marks.clone(),
        logarithmic_if_wide: false,
    };
    let loss = vec![
        updates("training", |step| step.loss),
        found("validation", false, |found| Some(found.loss)),
        found("averaged weights", true, |found| Some(found.loss)),
    ];
    let quality = if is_regression(points) {
        let series = vec![
            found("Spearman", false, |found| found.fit.map(|fit| fit.spearman)),
            found("Pearson", false, |found| found.fit.map(|fit| fit.pearson)),
        ];
        chart("Correlation", "correlation", series)
    } else {
        let series = vec![
            updates("training", |step| 100.0 * step.top1),
            found("validation", false, |found| Some(100.0 * found.top1)),
            found("averaged weights", true, |found| Some(100.0 * found.top1)),
        ];
        chart("Top-1 accuracy", "%", series)
    };
    [
        Chart { logarithmic_if_wide: true, ..chart("Loss", "loss", loss) },
        quality,
        chart("Learning rate", "learning rate", vec![updates("learning rate", |step| step.lr)]),
        chart(
            "Throughput",
            "samples/s",
            vec![updates("all ranks", |step| step.samples_per_second)],
        ),
    ]
}

fn evaluations(page: &mut Page, points: &[StreamMetricsResponse]) {
    let heads = if is_regression(points) {
        ["Step", "Set", "Loss", "Spearman", "MAE", "Averaged: loss", "Spearman", "MAE"]
    } else {
        ["Step", "Set", "Loss", "Top-1", "Top-5", "Averaged: loss", "Top-1", "Top-5"]
    };
    let found = |accuracy: Option<&Accuracy>| match accuracy {
        None => [const { String::new() }; 3],
        Some(Accuracy { loss, fit: Some(fit), .. }) => [*loss, fit.spearman, fit.mae].map(short),
        Some(Accuracy { loss, top1, top5, .. }) => [short(*loss), percent(*top1), percent(*top5)],
    };
    let rows: Vec<_> = evaluated(points)
        .map(|one| {
            let first = [one.step.to_string(), one.extent_name().unwrap_or_default()];
            [&first[..], &found(one.accuracy.as_ref()), &found(one.ema.as_ref())].concat()
        })
        .collect();
    page.table("Evaluations", "None was made.", &heads, &rows);
}

fn recoveries(page: &mut Page, status: &GetStatusResponse) {
    let part = |seconds: Option<f64>| seconds.map(duration).unwrap_or_default();
    let rows: Vec<_> = status
        .recoveries
        .iter()
        .map(|one| {
            vec![
                one.generation.to_string(),
                one.cause.clone(),
                if one.planned { "planned" } else { "failure" }.to_owned(),
                part(one.settle_seconds),
                part(one.tear_down_seconds),
                part(one.respawn_seconds),
                part(one.rendezvous_seconds),
                part(one.restore_seconds),
                part(one.first_step_seconds),
                part(one.total_seconds),
                one.lost_steps.to_string(),
            ]
        })
        .collect();
    let heads = [
        "Generation",
        "Cause",
        "Kind",
        "Settle",
        "Tear down",
        "Respawn",
        "Rendezvous",
        "Restore",
        "First step",
        "Total",
        "Steps lost",
    ];
    page.table("Recoveries", "There was nothing to recover from.", &heads, &rows);
}

fn divergences(page: &mut Page, status: &GetStatusResponse) {
    let rows: Vec<_> = status
        .incidents
        .iter()
        .map(|incident| {
            let step = incident.diagnosis.as_ref().map_or(0, |diagnosis| diagnosis.step);
            let words = [incident.cause.clone(), incident.remedy.clone()];
            [vec![incident.generation.to_string(), step.to_string()], words.to_vec()].concat()
        })
        .collect();
    let heads = ["Generation", "After step", "Cause", "Remedy"];
    page.table("Divergences", "Training did not go wrong.", &heads, &rows);
}

fn events(page: &mut Page, events: &[WatchEventsResponse]) {
    let rows: Vec<_> = events
        .iter()
        .map(|event| {
            vec![
                time(event.unix_millis),
                event.kind().name().replace('_', " "),
                event.generation.to_string(),
                event.step.map(|step| step.to_string()).unwrap_or_default(),
                event.message.clone(),
            ]
        })
        .collect();
    let heads = ["Time (UTC)", "Event", "Generation", "Step", "What"];
    page.table("Events", "There was none.", &heads, &rows);
}

fn ranks(page: &mut Page, status: &GetStatusResponse) {
    let rows: Vec<_> = status
        .ranks
        .iter()
        .map(|rank| {
            vec![
                rank.rank.to_string(),
                rank.node_id.clone(),
                rank.local_rank.to_string(),
                rank.gpu.as_ref().map(|gpu| gpu.name.clone()).unwrap_or_default(),
                rank.state.clone(),
                rank.pulse.map(|pulse| pulse.step.to_string()).unwrap_or_default(),
                rank.slowness.map(short).unwrap_or_default(),
                rank.loader.as_ref().map(|loader| loader.skipped.to_string()).unwrap_or_default(),
            ]
        })
        .collect();
    let heads =
        ["Rank", "Node", "Place", "GPU", "Last state", "Step", "Slowness", "Samples skipped"];
    page.table("Ranks", "There was none.", &heads, &rows);
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn money(dollars: f64) -> String {
    format!("${dollars:.2}")
}

/// A duration in at most two units.
fn duration(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX).as_secs();
    let (days, hours, minutes) = (whole / 86_400, whole / 3_600 % 24, whole / 60 % 60);
    match whole {
        0..60 => format!("{:.1} s", seconds.max(0.0)),
        60..3_600 => format!("{minutes} min {:02} s", whole % 60),
        3_600..86_400 => format!("{hours} h {minutes:02} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// A moment as `2025-11-13T02:13:20Z`; nothing for what is no moment of the years to 9999.
fn time(unix_millis: u64) -> String {
    const END: u64 = 253_402_300_800_000;
    if unix_millis >= END {
        return String::new();
    }
    let moment = UNIX_EPOCH + Duration::from_millis(unix_millis);
    humantime::format_rfc3339_seconds(moment).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goodput_is_what_interruptions_and_pauses_leave() {
        let spending = Spending {
            hours: 4.0,
            interruption_hours: 0.5,
            paused_hours: 0.5,
            ..Default::default()
        };

        assert_eq!(goodput(&spending), Some(0.75));
        assert_eq!(goodput(&Spending::default()), None);
    }

    #[test]
    fn the_median_recovery_leaves_out_what_did_not_end() {
        let recoveries = |seconds: &[Option<f64>]| -> Vec<Recovery> {
            let one = |total_seconds: &_| Recovery {
                total_seconds: *total_seconds,
                ..Default::default()
            };
            seconds.iter().map(one).collect()
        };

        assert_eq!(
            median_recovery(&recoveries(&[Some(9.0), None, Some(1.0), Some(2.0)])),
            Some(2.0)
        );
        assert_eq!(median_recovery(&recoveries(&[Some(4.0), Some(1.0)])), Some(2.5));
        assert_eq!(median_recovery(&recoveries(&[None])), None);
    }

    #[test]
    fn moments_and_durations_are_written_for_people() {
        assert_eq!(time(1_763_000_000_999), "2025-11-13T02:13:20Z");
        assert_eq!(time(u64::MAX), "");
        assert_eq!(duration(7_500.0), "2 h 05 min");
        assert_eq!(duration(f64::NAN), "0.0 s");
    }
}
