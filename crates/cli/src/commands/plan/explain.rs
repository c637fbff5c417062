//! The arithmetic of a plan, so that a reader can check every number by hand. Pure functions.

use std::fmt::Write;

use baton_plan::{
    Machine, PlanRequest, RecipePlan,
    plan::PlannedSegment,
    price,
    roofline::{
        BANDWIDTH_EFFICIENCY, FP32_EFFICIENCY, LAUNCH_SECONDS, Roofline, TENSOR_CORE_EFFICIENCY,
        TimeByLimit,
    },
};
use baton_program::program::shape_text;

use super::table::{dollars, wrapped};
use crate::human::{bytes, count, duration, grouped};

pub(super) fn text(request: &PlanRequest<'_>, plan: &RecipePlan, machine: &Machine) -> String {
    let mut text = format!(
        "{}: {} with {} {} and {} vCPUs\n",
        machine.name, machine.instance, machine.gpus, machine.gpu.name, machine.vcpus
    );
    let mut line = |name: &str, value: String| {
        // Writing to a string never fails.
        let _ = writeln!(text, "{}", wrapped(&format!("  {name:<24}"), &value));
    };
    line(
        "memory of one GPU",
        format!(
            "at most {} of {}, with micro-batches of {} samples of {}:",
            bytes(plan.memory.total_bytes),
            bytes(plan.gpu_memory_bytes),
            plan.memory_segment.micro_batch,
            match request.language {
                Some(_) => format!("{} tokens", request.spec.data.sequence),
                None => size(request, plan.memory_segment.resolution),
            }
        ),
    );
    for part in &plan.memory.parts {
        line(&format!("  {}", part.name), format!("{}: {}", bytes(part.bytes), part.how));
    }
    rates(request, plan, machine, &mut line);
    for planned in &plan.segments {
        segment_lines(request, plan, planned, &mut line);
    }
    let evaluation = &plan.evaluation;
    line(
        "evaluations",
        format!(
            "{} samples of {}, forward passes per sample: {}, at {:.0} samples/s: {}",
            grouped(evaluation.samples),
            size(request, evaluation.resolution),
            evaluation.passes,
            evaluation.images_per_second,
            duration(evaluation.seconds)
        ),
    );
    if let Some(generate) = &request.spec.evaluation.generate {
        line(
            "texts",
            format!(
                "in each evaluation {} of at most {} tokens, those of a batch together: {}, part of the above",
                generate.samples,
                generate.max_tokens,
                duration(evaluation.generate_seconds)
            ),
        );
    }
    let minutes = plan.seconds / 60.0;
    line("time", format!("sum of the above: {minutes:.1} min"));
    for cost in &plan.costs {
        let source = match cost.kind {
            "given" => "given by --price".to_owned(),
            kind => format!(
                "{}, {}, looked up {}",
                kind.replace('_', " "),
                price::SOURCE,
                price::LOOKED_UP
            ),
        };
        line(
            "cost",
            format!(
                "{minutes:.1} min / 60 x ${:.4} per hour = {} ({source})",
                cost.dollars_per_hour,
                dollars(cost.dollars)
            ),
        );
    }
    text.trim_end().to_owned()
}

/// The assumed speeds of the GPU and the data loader.
fn rates(
    request: &PlanRequest<'_>,
    plan: &RecipePlan,
    machine: &Machine,
    line: &mut impl FnMut(&str, String),
) {
    let compute = request.spec.precision.compute;
    let arithmetic = machine.gpu.arithmetic(compute);
    let roofline = Roofline::new(&machine.gpu, compute);
    let efficiency = if arithmetic.tensor_cores { TENSOR_CORE_EFFICIENCY } else { FP32_EFFICIENCY };
    line(
        "arithmetic",
        format!(
            "{:.1} TFLOPS of {} (data sheet) x {efficiency} = {:.1} TFLOPS",
            arithmetic.peak / 1e12,
            arithmetic.format,
            roofline.flop_per_second / 1e12
        ),
    );
    line(
        "memory bandwidth",
        format!(
            "{:.0} GB/s (data sheet) x {BANDWIDTH_EFFICIENCY} = {:.0} GB/s; each operation takes at least \
             {:.0} us to launch",
            machine.gpu.bandwidth / 1e9,
            roofline.bytes_per_second / 1e9,
            LAUNCH_SECONDS * 1e6
        ),
    );
    if let Some(factor) = plan.calibration {
        line("calibration", format!("all GPU times x {factor:.3}, as measured"));
    }
    line(
        "data loader",
        match plan.loader {
            None => "speed known for images only; assumed to be fast enough".to_owned(),
            Some(loader) => format!(
                "{} threads x {} images/s (docs/measurements/loader.md) = {:.0} images/s",
                loader.threads, loader.images_per_second_and_thread, loader.images_per_second
            ),
        },
    );
}

fn segment_lines(
    request: &PlanRequest<'_>,
    plan: &RecipePlan,
    planned: &PlannedSegment,
    line: &mut impl FnMut(&str, String),
) {
    let PlannedSegment { segment, step, .. } = planned;
    line(
        &format!("epochs {}-{}", segment.first_epoch, segment.last_epoch()),
        format!(
            "{}, {} samples per step on {}; {} of {} per rank:",
            size(request, segment.resolution),
            segment.global_batch,
            count(plan.ranks.into(), "rank"),
            batches(step.micro_batches),
            step.micro_batch
        ),
    );
    for row in &step.pass {
        let flop = match row.flop {
            0.0 => String::new(),
            flop => format!("{:.1} GFLOP, ", flop / 1e9),
        };
        line(
            &format!("  {}", row.kind.name()),
            format!("{flop}{}: {}", bytes(row.bytes as u64), bounds(row.seconds)),
        );
    }
    let reduced = step.all_reduce.map_or("none with one rank; 0".to_owned(), |all_reduce| {
        format!(
            "{} per rank over {} at {:.1} GB/s, {:.2}",
            bytes(all_reduce.bytes as u64),
            all_reduce.way,
            all_reduce.bytes_per_second / 1e9,
            all_reduce.seconds * 1e3
        )
    });
    line("  all-reduce", format!("{reduced} ms"));
    let moved = bytes(step.optimizer_bytes as u64);
    line("  optimizer", format!("{moved}: {:.2} ms", step.optimizer_seconds * 1e3));
    line(
        "  step",
        format!(
            "{} x {:.2} + sums {:.2} + all-reduce + optimizer = {:.2} ms",
            step.micro_batches,
            step.passes.total() * 1e3 / step.micro_batches.max(1) as f64,
            step.sum_seconds * 1e3,
            step.seconds * 1e3
        ),
    );
    line(
        "  time",
        format!(
            "{} samples at {:.0} samples/s (limit: {}): {}",
            grouped(planned.samples),
            planned.images_per_second,
            planned.limit.name(),
            duration(planned.seconds)
        ),
    );
}

/// Size of a sample: the resolution of an image, the mean number of tokens, or the shape of a signal or array.
fn size(request: &PlanRequest<'_>, resolution: u32) -> String {
    let [channels, length] = request.signal;
    match request.program {
        _ if let Some(plan) = request.language => format!("{} tokens", plan.mean_tokens),
        _ if request.takes_images() => format!("{resolution} px"),
        Some(program) => {
            let shapes = program.inputs.iter().map(|input| shape_text(&input.shape));
            shapes.collect::<Vec<_>>().join(", ")
        }
        None => format!("{channels} x {length} values"),
    }
}

fn batches(number: u64) -> String {
    if number == 1 { "1 micro-batch".to_owned() } else { format!("{number} micro-batches") }
}

/// Milliseconds by what limits the operations, without those that are zero.
fn bounds(seconds: TimeByLimit) -> String {
    let parts = [
        (seconds.arithmetic, "arithmetic"),
        (seconds.bandwidth, "memory"),
        (seconds.launches, "launches"),
    ];
    let parts = parts.iter().filter(|(seconds, _)| *seconds > 0.0);
    let parts = parts.map(|(seconds, limit)| format!("{:.2} ms {limit}", seconds * 1e3));
    parts.collect::<Vec<_>>().join(" + ")
}
