//! How the ranks of a new generation come to hold the same state.
//!
//! Whoever made the most updates gives its state to all: no step is lost while one rank that made it
//! lives. If nobody holds any, all read the checkpoint that the [`Restore`] rule names: see
//! [`restoring`].

use baton_checkpoint::{Manifest, Store};
use baton_collectives::Collective;
use baton_job::{
    Generation, Rank,
    message::{Restore, StateSource},
};
use baton_recipe::{
    JobSpec, Step,
    progress::{Agenda, Progress},
};
use serde::{Deserialize, Serialize};

use crate::{Error, Learner, restoring};

/// The state to begin with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Agreed {
    pub(crate) source: StateSource,
    pub(crate) position: Position,
}

/// Where a rank stands: replicated like the state itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) progress: Progress,
    /// Step of the last checkpoint that was committed; `progress.saved` counts failed tries too.
    pub(crate) durable: Option<Step>,
    /// Times that training went back before: a state from before the last one counts no more.
    pub(crate) rollbacks: usize,
}

/// What decides where training begins if no rank holds a state.
#[derive(Clone, Copy)]
pub(crate) struct Basis<'a> {
    pub(crate) spec: &'a JobSpec,
    pub(crate) agenda: &'a Agenda,
    pub(crate) store: &'a Store,
    pub(crate) restore: &'a Restore,
}

/// What was found out before any state moves.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) agreed: Agreed,
    pub(crate) source: Source,
}

/// Who holds what others lack.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Source {
    /// Nobody lacks anything.
    Everybody,
    /// There is nothing: all set the same weights.
    Seed,
    /// One rank holds all.
    One(Rank),
    /// Each rank has read its share of this checkpoint.
    Readers(Box<Manifest>),
}

/// Agrees on where to begin. This may fill `learner` with a rank's share of a checkpoint.
pub(crate) fn plan<L: Learner>(
    collective: &mut dyn Collective,
    held: Option<&Position>,
    learner: &mut L,
    basis: Basis<'_>,
) -> Result<Plan, Error> {
    let mine = held.map(|position| position.progress.step);
    let steps: Vec<Option<Step>> = gather(collective, &mine)?;
    let furthest = steps.iter().flatten().max().copied();
    let Some(holder) = steps.iter().position(|step| step.is_some() && *step == furthest) else {
        return restoring::restore(collective, learner, basis);
    };
    let holder = Rank(u32::try_from(holder).unwrap_or_default());
    let mine = held.filter(|_| collective.rank() == holder).cloned();
    let mut offers: Vec<Option<Position>> = gather(collective, &mine)?;
    let position = offers
        .get_mut(holder.0 as usize)
        .and_then(Option::take)
        .ok_or(Error::Bug("the rank with the furthest step offered no state"))?;
    let agreed = Agreed { source: StateSource::Survivor { rank: holder }, position };
    let source = match steps.iter().all(|step| *step == furthest) {
        true => Source::Everybody,
        false => Source::One(holder),
    };
    Ok(Plan { agreed, source })
}

/// Moves the state that [`plan`] found to those who lack it.
pub(crate) fn carry_out<L: Learner>(
    source: &Source,
    collective: &mut dyn Collective,
    learner: &mut L,
) -> Result<(), Error> {
    match source {
        Source::Everybody => Ok(()),
        Source::Seed => Ok(learner.initialise()?),
        Source::One(giver) => {
            let regions = learner.regions().into_iter();
            for region in regions.filter(|region| !region.buffer.is_empty()) {
                collective.broadcast(*giver, region.buffer)?;
            }
            Ok(())
        }
        Source::Readers(manifest) => restoring::exchange(manifest, collective, learner),
    }
}

/// Every rank's value, by rank.
pub(crate) fn gather<T: Serialize + for<'de> Deserialize<'de>>(
    collective: &mut dyn Collective,
    mine: &T,
) -> Result<Vec<T>, Error> {
    let all = collective.all_gather_bytes(&serde_json::to_vec(mine)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(Error::from)).collect()
}

impl Basis<'_> {
    /// Where training stands with a state that `written_by` left, and what it has to do otherwise since.
    pub(crate) fn position(
        &self,
        mut progress: Progress,
        durable: Option<Step>,
        written_by: Generation,
    ) -> Position {
        let rollbacks = &self.restore.rollbacks;
        for rollback in rollbacks.iter().filter(|r| r.generation > written_by) {
            match rollback.skip {
                Some(batch) => progress.skips.extend(self.agenda.with_the_one_before(batch)),
                None => progress.lr_cuts += 1,
            }
        }
        Position { progress, durable, rollbacks: rollbacks.len() }
    }
}
