//! Plans of a recipe as a table for people. The text may change at any time; scripts use `--json`. Pure functions.

use baton_plan::{PlanRequest, RecipePlan, plan::Cost, price, step::Bottleneck};
use comfy_table::{CellAlignment, Table, presets};

use crate::human::{count, grouped};

/// 2³⁰ bytes.
const GIB: f64 = 1_073_741_824.0;

/// Maximum width of a line, in columns.
pub(super) const WIDTH: usize = 100;

/// The whole text. `assumed`: the sizes of the data sets are assumed, not known.
pub(super) fn text(request: &PlanRequest<'_>, plans: &[RecipePlan], assumed: bool) -> String {
    let mut sections = vec![heading(request, assumed), table(request, plans)];
    let notes: Vec<String> = notes(plans).iter().map(|note| wrapped("", note)).collect();
    if !notes.is_empty() {
        sections.push(notes.join("\n"));
    }
    sections.push(footer(request, plans));
    sections.join("\n\n")
}

fn heading(request: &PlanRequest<'_>, assumed: bool) -> String {
    let spec = request.spec;
    let sizes = [request.samples, request.val_samples].map(grouped);
    let source = match assumed {
        true => " (assumed: ImageNet; set others with --samples)",
        false => "",
    };
    format!(
        "{}: {} for {}\n{} training and {} validation samples{source}",
        spec.name,
        spec.model.arch.name(),
        count(spec.train.epochs.into(), "epoch"),
        sizes[0],
        sizes[1]
    )
}

/// Notes of all plans; a note that several machines share is shown once.
fn notes(plans: &[RecipePlan]) -> Vec<String> {
    let mut notes: Vec<(Vec<&str>, &str)> = Vec::new();
    for (plan, note) in
        plans.iter().flat_map(|plan| plan.notes.iter().map(move |note| (plan, note)))
    {
        match notes.iter_mut().find(|(_, known)| known == note) {
            Some((machines, _)) => machines.push(plan.machine),
            None => notes.push((vec![plan.machine], note)),
        }
    }
    notes.iter().map(|(machines, note)| format!("{}: {note}", machines.join(", "))).collect()
}

/// `text` after `start`, wrapped at [`WIDTH`]; further lines are indented by the width of `start`, or by two
/// spaces if it is empty.
pub(super) fn wrapped(start: &str, text: &str) -> String {
    let indent = if start.is_empty() { "  ".to_owned() } else { " ".repeat(start.len()) };
    let (mut lines, mut line) = (Vec::new(), start.to_owned());
    for word in text.split(' ') {
        let is_empty = line.trim_end().is_empty() || line == start;
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(std::mem::replace(&mut line, indent.clone()));
        }
        if !line.is_empty() && !line.ends_with(' ') {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.join("\n")
}

fn table(request: &PlanRequest<'_>, plans: &[RecipePlan]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let speed = if request.language.is_some() { "TOKENS/S" } else { "IMG/S" };
    let mut header = vec!["MACHINE", "GPUS", "GIB", "BATCH", speed, "LIMIT", "TIME"];
    header.extend(match request.dollars_per_hour {
        Some(_) => vec!["COST"],
        None => vec!["ON DEMAND", "SPOT"],
    });
    let columns = header.len();
    table.set_header(header);
    for plan in plans {
        let mut row = vec![
            plan.machine.to_owned(),
            gpus(plan),
            needed(plan),
            format!("{}/{}", plan.micro_batch, plan.largest_micro_batch),
            grouped(speed_of(request, plan.images_per_second)),
            short(plan.limit).to_owned(),
            time(plan.seconds),
        ];
        row.extend(plan.costs.iter().map(|cost| dollars(cost.dollars)));
        row.resize(columns, "-".to_owned());
        table.add_row(row);
    }
    let right = [4, 6, 7, 8];
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
        if right.contains(&column.index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Samples per second, or tokens.
fn speed_of(request: &PlanRequest<'_>, samples_per_second: f64) -> u64 {
    let tokens = request.language.map_or(1, |plan| plan.mean_tokens);
    (samples_per_second * tokens as f64).round() as u64
}

/// The GPUs of a machine, and how many of them train if not all do.
fn gpus(plan: &RecipePlan) -> String {
    let idle = if plan.ranks < plan.gpus { format!("{} of ", plan.ranks) } else { String::new() };
    format!("{idle}{} {}", plan.gpus, plan.gpu)
}

/// Needed and available memory of one GPU.
fn needed(plan: &RecipePlan) -> String {
    let gib = |bytes: u64| format!("{:.1}", bytes as f64 / GIB);
    let verdict = if plan.fits { "" } else { " NO" };
    format!("{}/{}{verdict}", gib(plan.memory.total_bytes), gib(plan.gpu_memory_bytes))
}

/// The bottleneck in one word.
fn short(limit: Bottleneck) -> &'static str {
    match limit {
        Bottleneck::MemoryBandwidth => "memory",
        Bottleneck::Launches => "launches",
        Bottleneck::Loader => "loader",
        Bottleneck::Arithmetic | Bottleneck::AllReduce | Bottleneck::Optimizer => limit.name(),
    }
}

/// A time in minutes, or in hours from 100 minutes on.
fn time(seconds: f64) -> String {
    match seconds / 60.0 {
        minutes if minutes < 100.0 => format!("{minutes:.1} min"),
        minutes => format!("{:.1} h", minutes / 60.0),
    }
}

/// An amount of money, with cents below $1,000.
pub(super) fn dollars(amount: f64) -> String {
    if amount < 1_000.0 {
        format!("${amount:.2}")
    } else {
        format!("${}", grouped(amount.round() as u64))
    }
}

fn footer(request: &PlanRequest<'_>, plans: &[RecipePlan]) -> String {
    let estimate = match (request.calibration, plans.first().and_then(|plan| plan.calibration)) {
        (Some(measured), Some(factor)) => format!(
            "Calibrated: {:.1} images/s were measured on one GPU ({} at {} px, batch {}), so all GPU times \
             of the roofline are multiplied by {factor:.3}.",
            measured.images_per_second(),
            measured.arch.name(),
            measured.resolution,
            measured.batch
        ),
        _ if request.language.is_some() => {
            "Estimated from data sheets, not measured, and for language models never compared with \
                                            a measurement (docs/plan.md)."
                .to_owned()
        }
        _ => "Estimated from data sheets, not measured; may be off by a third (docs/plan.md)."
            .to_owned(),
    };
    let costs = plans.first().map_or(&[][..], |plan| &plan.costs);
    let prices = match costs {
        [Cost { kind: "given", dollars_per_hour, .. }] => {
            format!("Cost at the given {} per hour.", dollars(*dollars_per_hour))
        }
        _ => format!(
            "Prices of {}: {}. Prices change; override them with --price.",
            price::LOOKED_UP,
            price::SOURCE
        ),
    };
    let batch = match request.language {
        None => "the recipe's micro-batch at its largest images / the largest that fits".to_owned(),
        Some(plan) => format!(
            "the recipe's micro-batch / the largest that fits, of sequences of {} tokens. TOKENS/S: with {} tokens \
             per sequence",
            request.spec.data.sequence, plan.mean_tokens
        ),
    };
    let columns = format!(
        "GIB: memory needed on one GPU, with allowances / its size. BATCH: {batch}. LIMIT: the bottleneck; memory is the \
         memory bandwidth. TIME: all epochs and evaluations, without starts, checkpoints and interruptions."
    );
    [&columns, &estimate, &prices].map(|text| wrapped("", text)).join("\n")
}
