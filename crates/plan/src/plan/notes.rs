//! Notes of a plan: problems and advice for the user.

use baton_language::decoder::SUBLAYERS;
use baton_recipe::{
    dry_run::{DryRun, EpochSegment},
    spec::{Adapter, Compute, DeviceChoice},
};

use super::{PlanRequest, RecipePlan};
use crate::{
    Machine, Notice, memory,
    notice::{EvaluationTime, missed_deadlines},
    program::working_format,
    step::Bottleneck,
};

impl PlanRequest<'_> {
    pub(super) fn notes(&self, plan: &RecipePlan, machine: &Machine, run: &DryRun) -> Vec<String> {
        let (spec, mut notes) = (self.spec, Vec::new());
        if !plan.fits {
            let EpochSegment { micro_batch, resolution, .. } = plan.memory_segment;
            let network = |resolution| self.network(resolution).ok();
            let (ranks, max_bytes) = (plan.ranks, plan.gpu_memory_bytes);
            let recompute = match (self.program, self.language) {
                (Some(_), _) => {
                    ", or name modules in train.recompute, which this plan does not count"
                }
                (None, Some(_)) => {
                    let has_sublayers = spec.train.recompute.iter().any(|name| name == SUBLAYERS);
                    match (has_sublayers, spec.adapter.as_ref().is_some_and(Adapter::is_nf4)) {
                        (true, true) => "",
                        (true, false) => ", or set adapter.base = nf4",
                        (false, true) => ", or set train.recompute = [\"sublayers\"]",
                        (false, false) => {
                            ", or set train.recompute = [\"layers\"] or [\"sublayers\"], or adapter.base = nf4"
                        }
                    }
                }
                (None, None) => ", or name stages in train.recompute",
            };
            let fewer = match self.language {
                Some(_) => "",
                None => " (BatchNorm then sees fewer samples)",
            };
            let remedy = match memory::accumulation_that_fits(spec, run, ranks, max_bytes, network)
            {
                Some(parts) => format!(
                    "--set train.grad_accumulation={parts} makes them fit{fewer}{recompute}"
                ),
                None => format!("lower train.global_batch{recompute}"),
            };
            let at =
                if self.takes_images() { format!(" at {resolution} px") } else { String::new() };
            notes.push(format!("micro-batches of {micro_batch}{at} do not fit: {remedy}"));
        }
        if spec.cluster.min_ranks > machine.gpus {
            notes.push(format!(
                "cluster.min_ranks = {} needs more than one such machine; this plan is for one, with \
                 --set cluster.min_ranks={}",
                spec.cluster.min_ranks, plan.ranks
            ));
        }
        if plan.ranks < machine.gpus {
            notes.push(format!(
                "{} of {} GPUs are idle: train.virtual_ranks = {} and cluster.max_ranks = {} allow \
                 no more",
                machine.gpus - plan.ranks,
                machine.gpus,
                spec.train.virtual_ranks,
                spec.cluster.max_ranks
            ));
        }
        if spec.precision.compute == Compute::Bf16 && machine.gpu.bf16.is_none() {
            notes.push(format!(
                "the {} has no bf16 and would emulate it: --set precision.compute=fp16",
                machine.gpu.name
            ));
        }
        if plan.limit == Bottleneck::Loader {
            let threads = plan.loader.map_or(0, |loader| loader.threads);
            notes.push(match threads < machine.vcpus {
                true => format!(
                    "only {threads} of {} vCPUs decode: raise data.decode_threads",
                    machine.vcpus
                ),
                false => "all vCPUs decode: choose a machine with more vCPUs, or use raw images"
                    .to_owned(),
            });
        }
        if let Some(program) = self.program {
            let format = working_format(spec.precision.compute);
            let side = u64::from(plan.memory_segment.resolution);
            let costs = program.costs(format, Some(side));
            notes.extend(costs.ok().and_then(|costs| costs.gaps()));
        }
        // All known machines are Amazon's.
        let evaluation =
            EvaluationTime { machine: plan.machine, seconds: plan.evaluation.longest_seconds };
        let missed = missed_deadlines(spec, &[evaluation], Notice::Ec2);
        notes.extend(missed.into_iter().map(|missed| missed.message));
        if spec.cluster.device == DeviceChoice::Cpu {
            notes.push("cluster.device = cpu: this plan is for GPUs nevertheless".to_owned());
        }
        notes
    }
}
