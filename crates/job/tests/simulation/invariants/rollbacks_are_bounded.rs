//! A job rolls back as often as its guard allows, each time with the next generation. Only after that does a divergence
//! end the job.

use baton_job::{
    Generation,
    engine::Record,
    exit::{Class, Outcome},
};

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct RollbacksAreBounded {
    made: u32,
    /// Generation of the last rollback, until it is opened.
    due: Option<Generation>,
    /// The last generation in the journal. The store may not have accepted it yet, but a restarted coordinator does not
    /// use its number again.
    opened: Generation,
}

impl Invariant for RollbacksAreBounded {
    fn sentence(&self) -> &'static str {
        "rollbacks are bounded, and each is carried out by the next generation"
    }

    fn check(&mut self, cluster: &Cluster, fact: &Fact) -> Result<(), String> {
        let guard = &cluster.plan.spec.guard;
        let most = if guard.enabled { guard.max_rollbacks } else { 0 };
        match fact {
            Fact::Persisted(Record::Diverged(incident)) => {
                let Some(rollback) = &incident.rollback else { return Ok(()) };
                self.made += 1;
                if self.made > most {
                    return Err(format!("{rollback:?} is number {} of {most}", self.made));
                }
                match self.due.replace(rollback.generation) {
                    Some(due) => Err(format!(
                        "{rollback:?} before generation {due} of the last rollback was opened"
                    )),
                    None => Ok(()),
                }
            }
            Fact::Forgotten(Record::Diverged(incident)) if incident.rollback.is_some() => {
                self.made -= 1;
                self.due = None;
                Ok(())
            }
            Fact::Persisted(Record::Opened { generation, .. }) => {
                let before = std::mem::replace(&mut self.opened, *generation);
                match self.due.take() {
                    Some(due) if due != *generation && due != before => {
                        Err(format!("generation {generation} was opened instead of {due}"))
                    }
                    _ => Ok(()),
                }
            }
            // A message that was in flight when the rollback was persisted must not undo it.
            Fact::Stepped { step, generations } => match self.due {
                Some(due) if generations.contains(&due) => {
                    Err(format!("generation {due} made step {step} before it was opened"))
                }
                _ => Ok(()),
            },
            Fact::Persisted(Record::Ended(Outcome::Failed { failure }))
                if failure.class == Class::Diverged && self.made < most =>
            {
                Err(format!("ended by divergence after {} rollbacks of {most}", self.made))
            }
            _ => Ok(()),
        }
    }
}
