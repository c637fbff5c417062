//! `baton metrics`

use baton_job::exit::Failure;
use baton_proto::v1::{
    EvaluatedStep, Metric, Step, StreamMetricsResponse, stream_metrics_response::Metrics,
};

use super::logs::show_all;
use crate::{
    connect::{Coordinator, CoordinatorFlags},
    human, json, output, render,
};

/// Print the metrics of steps and evaluations since the job's start
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton metrics
  baton metrics --follow                                 also new ones, until the job ends
  baton metrics --csv >digits.csv
  baton metrics --json | jq -r 'select(.evaluation).evaluation.top1'

If there are many steps, only some of them are printed. After a recovery or a rollback, training resumes from an \
earlier step; the later steps printed before are then invalid.")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Keep printing new metrics until the job ends
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
    let coordinator = Coordinator::find(&args.target)?;
    let mut points = coordinator.metrics(args.follow);
    points.open().await?;
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
    show_all(points, args.follow, coordinator, show).await
}

const HEADER: &str = "    STEP  EPOCH       LOSS          METRIC        LR  SAMPLES/S";

/// A row of the table.
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
        Metrics::Evaluation(evaluated) => {
            format!("{:>8}  evaluation: {}", evaluated.step, render::evaluation_metrics(evaluated))
        }
        Metrics::BeganAt(step) => {
            let verb = if *step == 0 { "starts" } else { "resumes" };
            format!("{step:>8}  training {verb} here, generation {}", point.generation)
        }
    })
}

/// Header of the CSV output. Columns are added at the end, never renamed or removed.
const CSV_HEADER: &str = "unix_millis,generation,kind,step,epoch,loss,top1,lr,samples_per_second,\
                          gradient_norm,loader_wait,resolution,global_batch,top5,ema_top1,spearman,metrics";

/// A line of the CSV output; columns that a kind of point does not have are empty.
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

/// Values of the columns of [`CSV_HEADER`] after `kind`.
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

/// Values of the columns of [`CSV_HEADER`] after `kind`.
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
    fn metrics_as_table() {
        assert_snapshot!(format!("{HEADER}\n{}", lines(row)));
    }

    #[test]
    fn metrics_as_csv() {
        let text = lines(csv);
        let columns = CSV_HEADER.split(',').count();
        assert!(text.lines().all(|line| line.split(',').count() == columns), "{text}");
        assert_snapshot!(format!("{CSV_HEADER}\n{text}"));
    }

    #[test]
    fn metrics_as_json() {
        assert_snapshot!(lines(|point| Some(json::line(point))));
    }
}
