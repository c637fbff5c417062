//! Plans of a recipe, a line each, for people. Pure: what goes in decides what comes out.

use baton_plan::{Plan, Question, plan::Cost, price, update::Limit};
use comfy_table::{CellAlignment, Table, presets};

use crate::human::{count, grouped};

/// 2³⁰ bytes.
const GIB: f64 = 1_073_741_824.0;

/// Columns of the narrowest screen that a plan is made for.
pub(super) const WIDTH: usize = 100;

pub(super) fn text(question: &Question<'_>, plans: &[Plan], assumed: bool) -> String {
    let mut sections = vec![heading(question, assumed), table(question, plans)];
    let notes: Vec<String> = notes(plans).iter().map(|note| wrapped("", note)).collect();
    if !notes.is_empty() {
        sections.push(notes.join("\n"));
    }
    sections.push(footing(question, plans));
    sections.join("\n\n")
}

fn heading(question: &Question<'_>, assumed: bool) -> String {
    let spec = question.spec;
    let sizes = [question.samples, question.val_samples].map(grouped);
    let from = match assumed {
        true => ": taken to be ImageNet's; --samples tells others",
        false => "",
    };
    format!(
        "{}: {} for {}\n{} training and {} validation samples{from}",
        spec.name,
        spec.model.arch.name(),
        count(spec.train.epochs.into(), "epoch"),
        sizes[0],
        sizes[1]
    )
}

/// What is to be said of machines, once if it is the same of several.
fn notes(plans: &[Plan]) -> Vec<String> {
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

/// `text` after `start`; what does not fit goes on below, indented as far.
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

fn table(question: &Question<'_>, plans: &[Plan]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let mut header = vec!["MACHINE", "GPUS", "GIB", "BATCH", "IMG/S", "LIMIT", "TIME"];
    header.extend(match question.dollars_per_hour {
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
            grouped(plan.images_per_second.round() as u64),
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

/// Those that train, of all.
fn gpus(plan: &Plan) -> String {
    let idle = if plan.ranks < plan.gpus { format!("{} of ", plan.ranks) } else { String::new() };
    format!("{idle}{} {}", plan.gpus, plan.gpu)
}

fn needed(plan: &Plan) -> String {
    let gib = |bytes: u64| format!("{:.1}", bytes as f64 / GIB);
    let verdict = if plan.fits { "" } else { " NO" };
    format!("{}/{}{verdict}", gib(plan.memory.total_bytes), gib(plan.gpu_memory_bytes))
}

/// A limit in one word.
fn short(limit: Limit) -> &'static str {
    match limit {
        Limit::MemoryBandwidth => "memory",
        Limit::Launches => "launches",
        Limit::Loader => "loader",
        Limit::Arithmetic | Limit::AllReduce | Limit::Optimizer => limit.name(),
    }
}

/// Minutes, or hours where there are many.
fn time(seconds: f64) -> String {
    match seconds / 60.0 {
        minutes if minutes < 100.0 => format!("{minutes:.1} min"),
        minutes => format!("{:.1} h", minutes / 60.0),
    }
}

/// An amount of money, with cents where they matter.
pub(super) fn dollars(amount: f64) -> String {
    if amount < 1_000.0 {
        format!("${amount:.2}")
    } else {
        format!("${}", grouped(amount.round() as u64))
    }
}

fn footing(question: &Question<'_>, plans: &[Plan]) -> String {
    let estimate = match (question.calibration, plans.first().and_then(|plan| plan.calibration)) {
        (Some(measured), Some(factor)) => format!(
            "Calibrated: {:.1} images/s were measured on one GPU ({} at {} px, batch {}), so all that the \
             GPU does is taken to last {factor:.3} times as long as the roofline says.",
            measured.images_per_second(),
            measured.arch.name(),
            measured.resolution,
            measured.batch
        ),
        _ => "Estimated from data sheets, not measured; may be off by a third (docs/plan.md)."
            .to_owned(),
    };
    let costs = plans.first().map_or(&[][..], |plan| &plan.costs);
    let prices = match costs {
        [Cost { kind: "given", dollars_per_hour, .. }] => {
            format!("Cost at the given {} per hour.", dollars(*dollars_per_hour))
        }
        _ => format!(
            "Prices as looked up on {}: {}. They change; --price.",
            price::LOOKED_UP,
            price::SOURCE
        ),
    };
    let columns = "GIB: needed on a GPU, with allowances, of what it has. BATCH: the recipe's micro-batch at \
                   its largest images, of the largest that fits. LIMIT: memory is its bandwidth. TIME: \
                   all epochs and evaluations; starts, checkpoints and interruptions come on top.";
    [columns, &estimate, &prices].map(|text| wrapped("", text)).join("\n")
}
