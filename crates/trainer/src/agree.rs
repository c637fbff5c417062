//! How the ranks of a new generation get the same state.
//!
//! The rank with the most updates sends its state to all others: no step is lost as long as a rank that completed it is
//! alive. If no rank has a state, all read the checkpoint that the [`Restore`] rule names: see [`restoring`].
//!
//! Every rank makes the same collective calls in the same order. A state that a rollback invalidated is dropped before
//! its rank reports `Ready`, so it never gets here. The messages of this module are never stored, and all ranks of a
//! generation run the same version.

use baton_checkpoint::{Manifest, SaveId};
use baton_collectives::Collective;
use baton_job::{
    Generation, Rank,
    message::{Restore, StateSource},
};
use baton_recipe::{JobSpec, Step, data_summary::DataSummary, progress::Progress};
use serde::{Deserialize, Serialize};

use crate::{BuildLearner, Error, Learner, TrainingJob, local_saves::LocalSaver, restoring};

/// The state to start from, and where it comes from.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AgreedState {
    pub(crate) source: StateSource,
    pub(crate) position: RunPosition,
}

/// Position of a rank in the run; replicated like the state itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunPosition {
    pub(crate) progress: Progress,
    /// The last committed checkpoint; `progress.saved` also counts failed attempts.
    pub(crate) durable: Option<SaveId>,
    /// Number of rollbacks so far. A state from before the last rollback is no longer valid.
    pub(crate) rollbacks: usize,
}

impl RunPosition {
    /// Step of the last committed checkpoint.
    pub(crate) fn durable_step(&self) -> Option<Step> {
        self.durable.map(|checkpoint| checkpoint.step)
    }
}

/// What decides where training begins if no rank has a state.
#[derive(Clone, Copy)]
pub(crate) struct RestoreContext<'a> {
    pub(crate) job: &'a TrainingJob,
    pub(crate) restore: &'a Restore,
    pub(crate) local: &'a LocalSaver,
}

/// Result of [`plan`]: the agreed state, and which ranks have its values.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RestorePlan {
    pub(crate) agreed: AgreedState,
    pub(crate) provider: StateProvider,
}

/// Where the ranks that lack the agreed state get it from.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum StateProvider {
    /// Every rank has it already.
    Everybody,
    /// There is no state: all ranks set the same weights from the seed.
    Seed,
    /// One rank has the whole state.
    One(Rank),
    /// Each rank has read its share of this checkpoint.
    Readers(Box<Manifest>),
}

/// What a rank brings to a new generation.
#[derive(Serialize, Deserialize)]
struct Entrant {
    /// The step after which it has the state.
    step: Option<Step>,
    /// Digest of its program.
    program: Option<String>,
    data: DataSummary,
}

/// Agrees on where to begin. `held` is the position of the state that this rank already has. This may load a rank's
/// share of a checkpoint into `learner`, or replace it by a new one.
pub(crate) fn plan<L: Learner>(
    collective: &mut dyn Collective,
    held: Option<&RunPosition>,
    (learner, build): (&mut L, &BuildLearner<L>),
    context: RestoreContext<'_>,
) -> Result<RestorePlan, Error> {
    let mine = Entrant {
        step: held.map(|position| position.progress.step),
        program: learner.program().map(str::to_owned),
        data: context.job.inputs.summary().clone(),
    };
    let all: Vec<Entrant> = gather(collective, &mine)?;
    let furthest = all.iter().filter_map(|entrant| entrant.step).max();
    let holder = furthest.and_then(|_| all.iter().position(|entrant| entrant.step == furthest));
    check_inputs(&all, holder, collective.rank(), &context.job.spec)?;
    let Some(holder) = holder else {
        return restoring::restore(collective, (learner, build), context);
    };
    let holder = Rank(u32::try_from(holder).unwrap_or_default());
    let mine = held.filter(|_| collective.rank() == holder).cloned();
    let mut offers: Vec<Option<RunPosition>> = gather(collective, &mine)?;
    let position = offers
        .get_mut(holder.0 as usize)
        .and_then(Option::take)
        .ok_or(Error::Bug("the rank with the furthest step offered no state"))?;
    let agreed = AgreedState { source: StateSource::Survivor { rank: holder }, position };
    let provider = match all.iter().all(|entrant| entrant.step == furthest) {
        true => StateProvider::Everybody,
        false => StateProvider::One(holder),
    };
    Ok(RestorePlan { agreed, provider })
}

/// Checks that all ranks have the same inputs. Without a `holder` of state the job cannot go on, and every rank fails.
/// With one, only ranks that differ from it fail, so that the others can go on without them.
fn check_inputs(
    all: &[Entrant],
    holder: Option<usize>,
    mine: Rank,
    spec: &JobSpec,
) -> Result<(), Error> {
    let reference = holder.unwrap_or(0);
    let mut problems =
        (0..all.len()).filter_map(|rank| Some((rank, difference(all, reference, rank, spec)?)));
    let Some((rank, problem)) = problems.next() else { return Ok(()) };
    let mine = mine.0 as usize;
    if let Some(own) = difference(all, reference, mine, spec) {
        return Err(Error::Mismatch(own));
    }
    Err(match holder {
        Some(_) => Error::Misfit { rank, problem },
        None => Error::Mismatch(problem),
    })
}

/// How the inputs of `rank` differ from those of `reference`.
fn difference(all: &[Entrant], reference: usize, rank: usize, spec: &JobSpec) -> Option<String> {
    let (expected, found) = (all.get(reference)?, all.get(rank)?);
    if found.program != expected.program {
        return Some(format!(
            "rank {rank} and rank {reference} have different networks in {}: copy the same files to all machines",
            spec.model.definition()
        ));
    }
    // With other files on one node, or a file that was replaced while some ranks had it open, the job would train
    // something else.
    let (expected, found) = (&expected.data, &found.data);
    let train = || Some((&spec.data.train, found.train.difference(&expected.train)?));
    let val = || Some((&spec.data.val, found.val.difference(&expected.val)?));
    let (set, difference) = train().or_else(val)?;
    Some(format!(
        "{set} differs between ranks: rank {rank} has {difference}, compared with rank {reference}; give all nodes the same \
         files, and do not replace them during a run"
    ))
}

/// Sends the state that [`plan`] agreed on to the ranks that lack it.
pub(crate) fn carry_out<L: Learner>(
    provider: &StateProvider,
    collective: &mut dyn Collective,
    learner: &mut L,
) -> Result<(), Error> {
    match provider {
        StateProvider::Everybody => Ok(()),
        StateProvider::Seed => Ok(learner.initialise()?),
        StateProvider::One(root) => {
            let regions = learner.regions().into_iter();
            for region in regions.filter(|region| !region.buffer.is_empty()) {
                collective.broadcast(*root, region.buffer)?;
            }
            Ok(())
        }
        StateProvider::Readers(manifest) => restoring::exchange(manifest, collective, learner),
    }
}

/// The values of all ranks, in rank order.
pub(crate) fn gather<T: Serialize + for<'de> Deserialize<'de>>(
    collective: &mut dyn Collective,
    mine: &T,
) -> Result<Vec<T>, Error> {
    let all = collective.all_gather_bytes(&serde_json::to_vec(mine)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(Error::from)).collect()
}

impl RestoreContext<'_> {
    /// Position of a state that generation `written_by` of this store wrote, with the changes that all later rollbacks
    /// require.
    pub(crate) fn position(
        &self,
        mut progress: Progress,
        durable: Option<SaveId>,
        written_by: Generation,
    ) -> RunPosition {
        let rollbacks = &self.restore.rollbacks;
        for rollback in rollbacks.iter().filter(|r| r.generation > written_by) {
            match rollback.skip {
                Some(batch) => {
                    progress.skips.extend(self.job.inputs.plan().with_preceding_batch(batch))
                }
                None => progress.lr_cuts += 1,
            }
        }
        RunPosition { progress, durable, rollbacks: rollbacks.len() }
    }
}
