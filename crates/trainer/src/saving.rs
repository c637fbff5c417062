//! Writing a checkpoint together: every rank its slice, rank 0 the manifest.

use std::time::{SystemTime, UNIX_EPOCH};

use baton_checkpoint::{
    Manifest, RegionInfo, RegionSlice, Retention, SaveId, ShardEntry, TensorInfo, slice_of,
};
use baton_collectives::Collective;
use baton_job::{
    Rank,
    message::{Commit, Restore},
    progress::Progress,
};

use crate::{Error, Job, Learner, agree::gather, learner::TensorPlace};

/// Saves the state after `progress`. The outer error ends the generation; the inner one is told, and
/// training goes on. All ranks get the same result.
pub(crate) fn save<L: Learner>(
    learner: &mut L,
    progress: &Progress,
    id: &SaveId,
    restore: &Restore,
    job: &Job,
    collective: &mut dyn Collective,
) -> Result<Result<Commit, String>, Error> {
    let (rank, world_size) = (collective.rank(), collective.world_size());
    let mine = write_shard(learner, id, rank, world_size, job);
    let shards: Vec<Result<ShardEntry, String>> = gather(collective, &mine)?;
    let shards: Result<Vec<ShardEntry>, String> = shards.into_iter().collect();
    let committed = match shards {
        Err(problem) => Err(problem),
        Ok(shards) if rank == Rank(0) => commit(learner, progress, id, restore, job, shards),
        // Told below by rank 0.
        Ok(_) => Err(String::new()),
    };
    let results: Vec<Result<Commit, String>> = gather(collective, &committed)?;
    let of_rank_0 = results.into_iter().next();
    Ok(of_rank_0.unwrap_or_else(|| Err("rank 0 told no result".to_owned())))
}

fn write_shard<L: Learner>(
    learner: &mut L,
    id: &SaveId,
    rank: Rank,
    world_size: u32,
    job: &Job,
) -> Result<ShardEntry, String> {
    let mut copies = Vec::new();
    for region in learner.regions() {
        let range = slice_of(region.buffer.len(), rank, world_size);
        let values =
            region.buffer.narrow(range.clone()).to_host().map_err(|error| error.to_string())?;
        copies.push((region.name, values));
    }
    let slices: Vec<RegionSlice<'_>> =
        copies.iter().map(|(name, values)| RegionSlice { name, values }).collect();
    job.store.write_shard(id, rank, world_size, &slices).map_err(|error| error.to_string())
}

fn commit<L: Learner>(
    learner: &mut L,
    progress: &Progress,
    id: &SaveId,
    restore: &Restore,
    job: &Job,
    shards: Vec<ShardEntry>,
) -> Result<Commit, String> {
    let spec = &job.spec;
    let regions = learner.regions();
    let regions = regions
        .iter()
        .map(|region| RegionInfo { name: region.name.to_owned(), len: region.buffer.len() })
        .collect();
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let manifest = Manifest {
        version: baton_checkpoint::VERSION,
        job: job.id,
        arch: spec.model.arch.name().to_owned(),
        recipe_hash: spec.recipe_hash(),
        recipe: spec.to_json(),
        generation: id.generation,
        step: progress.step,
        progress: progress.clone(),
        seed: spec.seed,
        virtual_ranks: spec.train.virtual_ranks,
        world_size: u32::try_from(shards.len()).unwrap_or(u32::MAX),
        regions,
        tensors: learner.tensors().into_iter().map(tensor_info).collect(),
        shards,
        created_unix_seconds: since_epoch.as_secs(),
    };
    let commit = job.store.commit(&manifest).map_err(|error| error.to_string())?;
    let retention = Retention {
        keep_last: spec.checkpoint.keep_last,
        keep_best: spec.checkpoint.keep_best,
        restore: restore.clone(),
        generation: id.generation,
    };
    for warning in job.store.prune(&retention).warnings {
        tracing::warn!("{warning}");
    }
    Ok(commit)
}

fn tensor_info(place: TensorPlace) -> TensorInfo {
    TensorInfo {
        name: place.name,
        shape: place.shape,
        region: place.region.to_owned(),
        offset: place.offset,
        channels_last: place.channels_last,
    }
}
