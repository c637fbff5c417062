//! Results of a run, as Markdown.

use std::{fmt::Write, time::Duration};

use baton_job::engine::Recovery;

use crate::{
    coordinator::CoordinatorCost,
    fleet::Fleet,
    ledger::Ledger,
    settings::{HOUR, Settings},
};

/// Results of a run.
pub(crate) struct RunReport<'a> {
    fleet: &'a Fleet,
    /// Wall time of the run, and its processor time.
    took: (Duration, Duration),
    /// Time to replay the journal of the whole run.
    replay: Duration,
}

impl<'a> RunReport<'a> {
    pub(crate) fn new(fleet: &'a Fleet, took: (Duration, Duration)) -> Self {
        let (_, replay) = fleet.coordinator.replayed(&fleet.settings, fleet.now);
        Self { fleet, took, replay }
    }

    /// Time lost because of recoveries, as the coordinator reports it to users.
    pub(crate) fn interrupted(&self) -> Duration {
        let spending = self.fleet.coordinator.engine.status().spending;
        spending.interrupted.read(spending.meter.read(self.fleet.now))
    }

    /// The same without the time of repeated steps.
    pub(crate) fn downtime(&self) -> Duration {
        let redo: Duration = self.recoveries().map(|recovery| recovery.redo).sum();
        self.interrupted().saturating_sub(redo)
    }

    /// The same as measured by the simulation, from the moment when training stopped.
    pub(crate) fn observed_downtime(&self) -> Duration {
        let first = self.recoveries().filter_map(|recovery| recovery.parts().first_step);
        Duration::from_millis(self.fleet.ledger.idle) + first.sum::<Duration>()
    }

    fn recoveries(&self) -> impl Iterator<Item = &Recovery> {
        self.fleet.coordinator.recoveries.iter()
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, to: &mut String) -> std::fmt::Result {
        let Fleet { settings, ledger, coordinator, now, .. } = self.fleet;
        writeln!(to, "{settings}\n")?;
        let wall = now.0 as f64;
        let percent = |time: u64| 100.0 * time as f64 / wall;
        writeln!(to, "| of {:.1} h | h | % |\n|---|---|---|", wall / HOUR)?;
        for (label, time) in [
            ("**goodput**: new steps, each as long as with all ranks", ledger.useful),
            ("additional time of steps because ranks were missing", ledger.slower),
            ("slower first steps, and pauses for checkpoints", ledger.stalled),
            ("repeated steps", ledger.redone),
            ("unfinished steps when a rank left", ledger.discarded),
            ("no training", ledger.idle),
            ("before the first step", ledger.starting),
        ] {
            writeln!(to, "| {label} | {:.2} | {:.2} |", time as f64 / HOUR, percent(time))?;
        }
        self.write_events(to)?;
        self.write_recoveries(to)?;
        write_days(to, settings, ledger)?;
        self.write_cost(to, &coordinator.cost)?;
        let (wall, processor) = self.took;
        let (wall, processor) = (wall.as_secs_f64(), processor.as_secs_f64());
        writeln!(to, "\nsimulated in {wall:.0} s, with {processor:.0} s of processor time")
    }

    fn write_events(&self, to: &mut String) -> std::fmt::Result {
        let Fleet { ledger, coordinator, booted, .. } = self.fleet;
        let planned = self.recoveries().filter(|recovery| recovery.planned).count();
        writeln!(to, "\n| | number |\n|---|---|")?;
        for (label, count) in [
            ("interruptions with a notice", ledger.with_notice),
            ("interruptions without a notice", ledger.without_notice),
            ("crashes of a rank", ledger.crashes),
            ("machines in total", u64::from(*booted)),
            ("generations", coordinator.generations),
            ("planned changes of nodes", planned as u64),
            ("recoveries from a failure", coordinator.recoveries.len() as u64 - planned as u64),
            ("ends of the job, restarted from a checkpoint", coordinator.ends.len() as u64),
            ("steps", ledger.high_water),
            ("steps lost and repeated", ledger.lost_steps),
            ("checkpoints", ledger.commits),
        ] {
            writeln!(to, "| {label} | {} |", grouped(count))?;
        }
        for end in &coordinator.ends {
            writeln!(to, "\n{end}")?;
        }
        Ok(())
    }

    fn write_recoveries(&self, to: &mut String) -> std::fmt::Result {
        let done: Vec<&Recovery> = self.recoveries().filter(|r| r.stepped_at.is_some()).collect();
        let mut totals: Vec<Duration> = done.iter().filter_map(|r| r.total()).collect();
        totals.sort();
        let (Some(longest), false) = (totals.last(), done.is_empty()) else { return Ok(()) };
        let median = totals[totals.len() / 2];
        writeln!(to, "\n| part of a recovery | total, h | average, s |\n|---|---|---|")?;
        for part in 0..6 {
            let took = |r: &&Recovery| r.parts().named()[part].1.unwrap_or_default();
            let sum: Duration = done.iter().map(took).sum();
            let name = done[0].parts().named()[part].0;
            let mean = sum.as_secs_f64() / done.len() as f64;
            writeln!(to, "| {name} | {:.2} | {mean:.2} |", sum.as_secs_f64() / 3_600.0)?;
        }
        let sum: Duration = totals.iter().sum();
        writeln!(
            to,
            "| **from the first report to the first step** | {:.2} | median {:.1}, longest {:.1} |",
            sum.as_secs_f64() / 3_600.0,
            median.as_secs_f64(),
            longest.as_secs_f64()
        )?;
        writeln!(
            to,
            "\ninterrupted, as the coordinator reports it: {:.2} h",
            self.interrupted().as_secs_f64() / 3_600.0
        )
    }

    fn write_cost(&self, to: &mut String, cost: &CoordinatorCost) -> std::fmt::Result {
        let Fleet { ledger, coordinator, now, .. } = self.fleet;
        let hours = now.0 as f64 / HOUR;
        let per_hour = |time: Duration| time.as_secs_f64() / hours;
        let heartbeats =
            cost.heartbeats.time.as_secs_f64() * 3_600.0 / (ledger.sampled_seconds.max(1)) as f64;
        writeln!(to, "\n| the coordinator | |\n|---|---|")?;
        for (label, value) in [
            ("control events", grouped(cost.control.events)),
            (
                "engine time for them, s per simulated hour",
                format!("{:.2}", per_hour(cost.control.time)),
            ),
            ("longest of them, ms", format!("{:.1}", 1e3 * cost.control.longest.as_secs_f64())),
            ("heartbeats handled, from one second of every hour", grouped(cost.heartbeats.events)),
            ("engine time for all heartbeats, s per simulated hour", format!("{heartbeats:.2}")),
            ("directives sent", grouped(cost.directives)),
            (
                "addresses sent, MB per generation",
                format!(
                    "{:.1}",
                    cost.address_bytes as f64 / 1e6 / coordinator.generations.max(1) as f64
                ),
            ),
            ("records in the journal", grouped(coordinator.records() as u64)),
            ("… MB of JSON", format!("{:.1}", cost.record_bytes as f64 / 1e6)),
            ("job events", grouped(cost.job_events)),
            ("… MB of JSON", format!("{:.1}", cost.event_bytes as f64 / 1e6)),
            (
                "time to write both as JSON, s per simulated hour",
                format!("{:.3}", per_hour(cost.writing)),
            ),
            (
                "time to replay the journal at the end, s",
                format!("{:.2}", self.replay.as_secs_f64()),
            ),
        ] {
            writeln!(to, "| {label} | {value} |")?;
        }
        Ok(())
    }
}

fn write_days(to: &mut String, settings: &Settings, ledger: &Ledger) -> std::fmt::Result {
    if ledger.days.is_empty() {
        return Ok(());
    }
    let millis = 86_400_000.0;
    writeln!(
        to,
        "\n| day | machines, average (of {}) | fewest | ranks that train, average (of {}) | generations | goodput, % |\n|---|---|---|---|---|---|",
        settings.machines(),
        settings.world_size()
    )?;
    let mut before = (0, 0);
    for (number, day) in (1..).zip(&ledger.days) {
        writeln!(
            to,
            "| {number} | {:.1} | {} | {:.0} | {} | {:.1} |",
            day.machines as f64 / millis,
            day.fewest_machines,
            day.ranks as f64 / millis,
            day.generations - before.0,
            100.0 * (day.useful - before.1) as f64 / millis
        )?;
        before = (day.generations, day.useful);
    }
    Ok(())
}

/// The number with a comma after every three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
