//! `baton metrics`

use std::{pin::pin, time::Duration};

use baton_job::exit::Failure;
use baton_proto::v1::{
    EvaluatedStep, Metric, Step, StreamMetricsResponse, stream_metrics_response::Metrics,
};

use super::{
    logs::is_over,
    watch::{PATIENCE, QUIET},
};
use crate::{
    connect::{Coordinator, Where},
    human, json, output, render,
};

/// Print the numbers of updates and evaluations over the job's whole life
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton metrics
  baton metrics --follow                                 and those to come, until the job ends
  baton metrics --csv >digits.csv
  baton metrics --json | jq -r 'select(.evaluation).evaluation.top1'

If there are many updates, some stand for all. After a recovery or a rollback training goes on from an earlier step: \
then later steps that were told before count no more.")]
pub(crate) struct Args {
    #[command(flatten)]
    place: Where,
    /// Go on with those to come, until the job ends
    #[arg(short, long)]
    follow: bool,
    /// Print one JSON object per line
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print comma-separated values with a header
    #[arg(long)]
    csv: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let coordinator = Coordinator::find(&args.place)?;
    let mut points = coordinator.metrics(args.follow);
    points.begin().await?;
    if args.csv {
        output::line(CSV_HEADER);
    } else if !args.json {
        output::line(HEADER);
    }
    let show = |point: &StreamMetricsResponse| {
        let line = match (args.json, args.csv) {
            (true, _) => Some(json::line(point)),
            (_, true) => csv(point),
            _ => row(point),
        };
        line.iter().for_each(output::line);
    };
    if !args.follow {
        while let Some(point) = points.next_or_end().await? {
            show(&point);
        }
        return Ok(());
    }
    let mut over = pin!(is_over(coordinator));
    loop {
        tokio::select! {
            point = points.next(PATIENCE) => show(&point?),
            () = &mut over => break,
        }
    }
    while let Ok(Ok(point)) = tokio::time::timeout(QUIET, points.next(Duration::ZERO)).await {
        show(&point);
    }
    Ok(())
}

const HEADER: &str = "    STEP  EPOCH       LOSS          METRIC        LR  SAMPLES/S";

/// For people.
fn row(point: &StreamMetricsResponse) -> Option<String> {
    Some(match point.metrics.as_ref()? {
        Metrics::Step(step) => format!(
            "{:>8}  {:>5}  {:>9.4}  {:>14}  {:>8}  {:>9.0}",
            step.step,
            u64::from(step.epoch) + 1,
            step.loss,
            step.named().first().map(render::metric).unwrap_or_default(),
            human::rate(step.lr),
            step.samples_per_second
        ),
        Metrics::Evaluation(found) => {
            format!("{:>8}  evaluation: {}", found.step, render::found(found))
        }
        Metrics::BeganAt(step) => {
            let begins = if *step == 0 { "begins" } else { "goes on from here" };
            format!("{step:>8}  training {begins}, generation {}", point.generation)
        }
    })
}

/// The names of what [`csv`] writes; fields are added at the end, never renamed or removed.
const CSV_HEADER: &str = "unix_millis,generation,kind,step,epoch,loss,top1,lr,samples_per_second,\
                          gradient_norm,loader_wait,resolution,global_batch,top5,ema_top1,spearman,metrics";

/// For spreadsheets; what a kind of point does not have is empty.
fn csv(point: &StreamMetricsResponse) -> Option<String> {
    let (kind, values) = match point.metrics.as_ref()? {
        Metrics::Step(step) => ("step", of_step(step)),
        Metrics::Evaluation(found) => ("evaluation", of_evaluation(found)),
        Metrics::BeganAt(step) => {
            let mut values: [String; 14] = Default::default();
            values[0] = step.to_string();
            ("began_at", values)
        }
    };
    Some(format!("{},{},{kind},{}", point.unix_millis, point.generation, values.join(",")))
}

fn of_step(step: &Step) -> [String; 14] {
    [
        step.step.to_string(),
        step.epoch.to_string(),
        step.loss.to_string(),
        step.top1.to_string(),
        step.lr.to_string(),
        step.samples_per_second.to_string(),
        step.gradient_norm.as_ref().map(ToString::to_string).unwrap_or_default(),
        step.loader_wait.to_string(),
        step.resolution.to_string(),
        step.global_batch.to_string(),
        String::new(),
        String::new(),
        String::new(),
        named("", &step.named()),
    ]
}

fn of_evaluation(found: &EvaluatedStep) -> [String; 14] {
    let mut values: [String; 14] = Default::default();
    let accuracy = found.accuracy.clone().unwrap_or_default();
    let ema = found.ema.as_ref().map(|ema| named("ema_", &ema.named()));
    values[13] = [Some(named("", &accuracy.named())), ema]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(";");
    values[0] = found.step.to_string();
    values[2] = accuracy.loss.to_string();
    if let Some(fit) = accuracy.fit {
        values[12] = fit.spearman.to_string();
        return values;
    }
    values[3] = accuracy.top1.to_string();
    values[10] = accuracy.top5.to_string();
    values[11] = found.ema.as_ref().map(|ema| ema.top1.to_string()).unwrap_or_default();
    values
}

/// `top1=0.912;loss=0.321`
fn named(prefix: &str, metrics: &[Metric]) -> String {
    let named = metrics.iter().map(|metric| format!("{prefix}{}={}", metric.name, metric.value));
    named.collect::<Vec<_>>().join(";")
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::testing;

    fn lines(line: impl Fn(&StreamMetricsResponse) -> Option<String>) -> String {
        testing::points().iter().filter_map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn numbers_for_people() {
        assert_snapshot!(format!("{HEADER}\n{}", lines(row)));
    }

    #[test]
    fn numbers_for_spreadsheets() {
        let text = lines(csv);
        let columns = CSV_HEADER.split(',').count();
        assert!(text.lines().all(|line| line.split(',').count() == columns), "{text}");
        assert_snapshot!(format!("{CSV_HEADER}\n{text}"));
    }

    #[test]
    fn numbers_for_scripts() {
        assert_snapshot!(lines(|point| Some(json::line(point))));
    }
}
