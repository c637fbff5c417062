//! All ranks that make an update are of the same generation. Commits never go back to an older generation, or to an
//! older step within a generation, and no commit is made below the fence.

use baton_job::Generation;

use super::Invariant;
use crate::{cluster::Cluster, fact::Fact};

#[derive(Default)]
pub(super) struct OnlyOneGenerationTrains {
    newest: (Generation, u64),
}

impl Invariant for OnlyOneGenerationTrains {
    fn sentence(&self) -> &'static str {
        "one generation trains, and only the newest commits"
    }

    fn check(&mut self, _: &Cluster, fact: &Fact) -> Result<(), String> {
        match fact {
            Fact::Stepped { step, generations } => {
                if generations.windows(2).all(|pair| pair[0] == pair[1]) {
                    return Ok(());
                }
                Err(format!("step {step} was made by generations {generations:?}"))
            }
            Fact::Committed { generation, step, fence } => {
                if generation < fence {
                    return Err(format!("generation {generation} commits below the fence {fence}"));
                }
                let before = std::mem::replace(&mut self.newest, (*generation, *step));
                if before <= self.newest {
                    return Ok(());
                }
                Err(format!("generation {generation}, step {step} is committed after {before:?}"))
            }
            _ => Ok(()),
        }
    }
}
