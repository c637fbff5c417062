//! Advice for a GPU whose memory is too small: the batch that would fit.

use baton_recipe::{JobSpec, dry_run::DryRun};

use crate::{
    memory::{Memory, accumulation_that_fits},
    network::Network,
};

/// Advice, as the end of a sentence, for one of `ranks` ranks whose GPU has `memory_bytes` of memory; `None` if the
/// network's size is unknown. `network` builds the network for a resolution.
///
/// The sizes are estimates, because the run failed before they could be measured.
pub fn for_memory(
    spec: &JobSpec,
    ranks: u32,
    samples: u64,
    memory_bytes: u64,
    network: impl Fn(u32) -> Option<Network>,
) -> Option<String> {
    let run = DryRun::new(spec, samples).ok()?;
    let needs = run.segments.iter().filter_map(|segment| {
        let network = network(segment.resolution)?;
        let need = Memory::new(spec, &network, ranks, segment.micro_batch).total_bytes;
        Some((need, segment.micro_batch, network))
    });
    let (need, micro_batch, largest) = needs.max_by_key(|(need, ..)| *need)?;
    let fits = Memory::largest_micro_batch(spec, &largest, ranks, memory_bytes);
    let gib = memory_bytes as f64 / f64::from(1 << 30);
    let problem =
        format!("of {gib:.0} GiB, {fits} samples at a time fit, and the recipe has {micro_batch}");
    if need <= memory_bytes {
        return Some(format!(
            "{problem}: check with `nvidia-smi` whether another process uses this GPU"
        ));
    }
    Some(match accumulation_that_fits(spec, &run, ranks, memory_bytes, network) {
        Some(parts) => format!(
            "{problem}: set train.grad_accumulation = {parts} (BatchNorm then sees fewer samples), or name stages \
             in train.recompute; see `baton plan`"
        ),
        None => format!(
            "{problem}: name stages in train.recompute, or lower train.global_batch or train.resolution; see \
             `baton plan`"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kit::recipe, network::InputShape};

    const GIB: u64 = 1 << 30;

    fn remedy_on(gib: u64, changes: &[&str]) -> String {
        let base = [
            "model={ arch='resnet50', num_classes=1000 }",
            "train={ epochs=1, global_batch=1024, resolution=224, virtual_ranks=1 }",
        ];
        let spec = recipe(&base, changes);
        let network = |resolution: u32| {
            Network::new(&spec.model, InputShape::Image { resolution: u64::from(resolution) })
        };
        for_memory(&spec, 1, 1_281_167, gib * GIB, network).unwrap()
    }

    /// The number that follows `before` in `text`.
    fn number(text: &str, before: &str) -> u64 {
        let rest = text.split(before).nth(1).unwrap_or_else(|| panic!("{before} in {text}"));
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    }

    #[test]
    fn a_batch_too_large_is_reported_with_the_one_that_fits_and_the_setting_for_it() {
        let text = remedy_on(40, &[]);
        let fits = number(&text, "GiB, ");
        assert!((64..1024).contains(&fits), "{text}");
        let parts = number(&text, "grad_accumulation = ");
        assert!(1024 / parts <= fits && 1024 % parts == 0, "{text}");
        // The advice gives a valid recipe that fits.
        let advice = format!("train.grad_accumulation={parts}");
        assert!(remedy_on(40, &[&advice]).contains("nvidia-smi"));
    }

    #[test]
    fn the_phase_that_needs_most_is_the_one_that_counts() {
        let changes = [
            "train.epochs=2",
            "train.global_batch=4096",
            "train.resolution=160",
            "train.phases=[{ from_epoch = 1, resolution = 224, global_batch = 256 }]",
        ];
        let text = remedy_on(40, &changes);
        assert!(text.contains("the recipe has 4096"), "{text}");
    }

    #[test]
    fn a_gpu_too_small_for_one_sample_is_reported() {
        let text = remedy_on(2, &[]);
        assert!(text.contains("0 samples at a time fit") && text.contains("recompute"), "{text}");
    }
}
