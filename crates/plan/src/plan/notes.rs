//! What the reader of a plan should know or change.

use baton_recipe::{
    Sees,
    dry_run::{DryRun, Stretch},
    spec::{Compute, Device},
};

use super::{Plan, Question};
use crate::{Machine, memory, update::Limit};

impl Question<'_> {
    pub(super) fn notes(&self, plan: &Plan, machine: &Machine, run: &DryRun) -> Vec<String> {
        let (spec, mut notes) = (self.spec, Vec::new());
        if !plan.fits {
            let Stretch { micro_batch, resolution, .. } = plan.memory_phase;
            let network = |resolution| self.network(resolution).ok();
            let (ranks, room) = (plan.ranks, plan.gpu_memory_bytes);
            let remedy = match memory::accumulation_that_fits(spec, run, ranks, room, network) {
                Some(parts) => format!(
                    "--set train.grad_accumulation={parts} makes it (BatchNorm then sees fewer samples), \
                     or name stages in train.recompute"
                ),
                None => "name stages in train.recompute, or lower train.global_batch".to_owned(),
            };
            let is_signal = spec.model.arch.sees() == Sees::Signals;
            let at = if is_signal { String::new() } else { format!(" at {resolution} px") };
            notes.push(format!("micro-batches of {micro_batch}{at} do not fit: {remedy}"));
        }
        if spec.cluster.min_ranks > machine.gpus {
            notes.push(format!(
                "cluster.min_ranks = {} waits for more than one such machine; planned for one, with \
                 --set cluster.min_ranks={}",
                spec.cluster.min_ranks, plan.ranks
            ));
        }
        if plan.ranks < machine.gpus {
            notes.push(format!(
                "{} of {} GPUs stay idle: train.virtual_ranks = {} and cluster.max_ranks = {} allow \
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
        if plan.limit == Limit::Loader {
            let threads = plan.loader.map_or(0, |loader| loader.threads);
            notes.push(match threads < machine.vcpus {
                true => format!(
                    "only {threads} of {} vCPUs decode: raise data.decode_threads",
                    machine.vcpus
                ),
                false => {
                    "every vCPU decodes: take a machine with more of them, or raw images".to_owned()
                }
            });
        }
        if spec.cluster.device == Device::Cpu {
            notes.push("cluster.device = cpu: the plan is for GPUs all the same".to_owned());
        }
        notes
    }
}
