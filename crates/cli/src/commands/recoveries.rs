//! `baton recoveries`

use baton_job::exit::Failure;
use baton_proto::v1::{GetStatusResponse, Recovery};
use baton_recipe::median;
use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, Row, Table, Width, presets,
};

use crate::{
    connect::{Coordinator, CoordinatorFlags},
    human, json, output, render,
};

/// Show the duration of each recovery and of its parts
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recoveries
  baton recoveries | less -S                              causes are not shortened to the terminal's width
  baton recoveries --json | jq .median_total_seconds
  baton recoveries --json | jq '.recoveries[-1].respawn_seconds'

A recovery starts with the first report of a failure, or with a planned change of nodes, and ends with the \
first step of the next generation. Its parts follow each other; all are in seconds:
  DETECT      until the next generation opens: waiting to learn which ranks were lost, and backoff
  TEAR DOWN   until the surviving ranks have left the old generation and are ready again
  RESPAWN     until the restarted ranks are ready too; 0 if there are none
  RENDEZVOUS  until all ranks have connected to each other
  RESTORE     until all ranks have the state, from a surviving rank or a checkpoint
  FIRST STEP  until the first step is done

GEN is the generation that takes over. LOST STEPS have to be repeated. A part that has not ended is \
\"…\". It is \"-\" if it never ends, because its generation failed too; the next line then shows the next attempt. A \
rendezvous that no rank could report is also \"-\"; its time is then part of RESTORE. Median and worst exclude planned \
changes. All recoveries are counted, and the newest 1,000 are kept, also over restarts of the coordinator.")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let status = Coordinator::find(&args.target)?.status().await?;
    let recoveries = json::Recoveries::from(&status);
    json::print(args.json, &recoveries, |_| text(&status, output::width()));
    Ok(())
}

impl From<&GetStatusResponse> for json::Recoveries {
    fn from(status: &GetStatusResponse) -> Self {
        let failures = status.recoveries.iter().filter(|recovery| !recovery.planned);
        let totals = failures.filter_map(|recovery| recovery.total_seconds);
        let totals: Vec<f64> = totals.collect();
        Self {
            recoveries_total: status.recoveries_total,
            median_total_seconds: median(totals.iter().copied()),
            worst_total_seconds: totals.into_iter().max_by(f64::total_cmp),
            lost_steps: status.recoveries.iter().map(|recovery| recovery.lost_steps).sum(),
            recoveries: status.recoveries.clone(),
        }
    }
}

/// The table and a summary, at most `width` columns wide.
fn text(status: &GetStatusResponse, width: Option<u16>) -> String {
    if status.recoveries.is_empty() {
        return "no recoveries: nothing has failed".to_owned();
    }
    format!("{}\n\n{}", table(status, width).trim_fmt(), summary(&status.into()))
}

/// Index of the column that is shortened on a narrow screen, and its minimum width.
const CAUSE_COLUMN: usize = 2;
const MIN_CAUSE_WIDTH: u16 = 16;

fn table(status: &GetStatusResponse, width: Option<u16>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_truncation_indicator("…").set_header([
        "WHEN",
        "GEN",
        "CAUSE",
        "TOTAL\n(s)",
        "DETECT",
        "TEAR\nDOWN",
        "RE-\nSPAWN",
        "RENDEZ-\nVOUS",
        "RE-\nSTORE",
        "FIRST\nSTEP",
        "LOST\nSTEPS",
    ]);
    let current = render::current_recovery(status);
    for recovery in &status.recoveries {
        table.add_row(row(recovery, current == Some(recovery)));
    }
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if number == CAUSE_COLUMN {
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(MIN_CAUSE_WIDTH)));
        } else {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
        if number > CAUSE_COLUMN {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn row(recovery: &Recovery, is_current: bool) -> Row {
    let unknown = if is_current { "…" } else { "-" };
    let or = |unknown: &str, text: Option<String>| text.unwrap_or_else(|| unknown.to_owned());
    let seconds = |seconds: f64| format!("{seconds:.2}");
    let parts = render::recovery_parts(recovery).map(|(_, part)| part.map(seconds));
    let ended = parts.iter().rposition(Option::is_some);
    let planned = if recovery.planned { "planned: " } else { "" };
    let lost_steps = recovery.restore_seconds.map(|_| human::grouped(recovery.lost_steps));
    let mut cells = vec![
        human::ago(recovery.age_seconds),
        recovery.generation.to_string(),
        format!("{planned}{}", recovery.cause),
        or(unknown, recovery.total_seconds.map(seconds)),
    ];
    // If a later part has ended, a missing part will never be reported.
    let unknown_at = |number| if Some(number) < ended { "-" } else { unknown };
    cells.extend((0..).zip(parts).map(|(number, part)| or(unknown_at(number), part)));
    cells.push(or(unknown, lost_steps));
    let mut row = Row::from(cells);
    row.max_height(1);
    row
}

/// `4 recoveries, 1 of them planned: median 0.56 s, worst 10.50 s; 12 steps lost`
fn summary(recoveries: &json::Recoveries) -> String {
    let json::Recoveries { recoveries_total, recoveries: shown_list, .. } = recoveries;
    let shown = human::grouped(shown_list.len() as u64);
    let all = human::grouped(*recoveries_total);
    let count = match *recoveries_total {
        1 => "1 recovery".to_owned(),
        _ if all == shown => format!("{all} recoveries"),
        _ => format!("the newest {shown} of {all} recoveries"),
    };
    let planned = shown_list.iter().filter(|recovery| recovery.planned).count();
    let planned = match planned {
        0 => String::new(),
        planned => format!(", {planned} of them planned"),
    };
    let took = match (recoveries.median_total_seconds, recoveries.worst_total_seconds) {
        (Some(median), Some(worst)) => format!(": median {median:.2} s, worst {worst:.2} s"),
        // These are the times of failures.
        _ if shown_list.iter().all(|recovery| recovery.planned) => String::new(),
        _ => ": none has reached its first step".to_owned(),
    };
    format!("{count}{planned}{took}; {} lost", human::count(recoveries.lost_steps, "step"))
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::testing;

    #[test]
    fn every_recovery_has_a_line_with_its_parts() {
        assert_snapshot!(text(&testing::recovering_again(), None));
    }

    #[test]
    fn causes_are_shortened_to_the_width_of_the_screen() {
        let shown = text(&testing::recovering_again(), Some(100));
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        assert_snapshot!(shown);
    }

    #[test]
    fn a_cause_keeps_its_beginning_on_a_narrow_screen() {
        let shown = table(&testing::recovering_again(), Some(80)).trim_fmt();
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
        assert_snapshot!(shown);
    }

    #[test]
    fn recoveries_as_json() {
        let json = json::Recoveries::from(&testing::recovering_again());
        assert_snapshot!(serde_json::to_string_pretty(&json).unwrap());
    }

    #[test]
    fn no_recovery_is_one_line_and_an_empty_list() {
        let status = testing::completed();
        assert_eq!(text(&status, None), "no recoveries: nothing has failed");
        let json = json::line(&json::Recoveries::from(&status));
        assert_eq!(
            json,
            r#"{"recoveries_total":0,"median_total_seconds":null,"worst_total_seconds":null,"lost_steps":0,"recoveries":[]}"#
        );
    }

    #[test]
    fn the_summary_counts_shown_and_all_recoveries() {
        let summary_of = |status: &GetStatusResponse| summary(&status.into());
        assert_eq!(
            summary_of(&testing::training()),
            "1 recovery: median 0.56 s, worst 0.56 s; 1 step lost"
        );
        let mut none_ended = testing::recovering();
        none_ended.recoveries.remove(0);
        assert_eq!(
            summary_of(&none_ended),
            "the newest 1 of 2 recoveries: none has reached its first step; 0 steps lost"
        );
        let mut planned = testing::training();
        planned.recoveries.iter_mut().for_each(|recovery| recovery.planned = true);
        let all = summary_of(&planned);
        assert_eq!(all, "1 recovery, 1 of them planned; 1 step lost");
    }
}
