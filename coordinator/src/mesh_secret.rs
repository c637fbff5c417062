//! Draws the secrets with which the ranks of a generation recognise each other.
//!
//! A secret is only in memory and in the messages that begin its generation. A restarted coordinator needs no old one:
//! it begins no generation that another has begun, because ranks that did not all meet get a new generation.

use anyhow::{Context, Result, ensure};
use baton_job::{Generation, MeshSecret};
use rustix::rand::{GetRandomFlags, getrandom};

/// The secret of the newest generation that was begun.
#[derive(Debug, Default)]
pub(crate) struct CurrentMeshSecret(Option<(Generation, MeshSecret)>);

impl CurrentMeshSecret {
    /// The secret of `generation`: the same for all its agents, and for one that reconnects.
    pub(crate) fn of(&mut self, generation: Generation) -> Result<MeshSecret> {
        if let Some((current, secret)) = &self.0
            && *current == generation
        {
            return Ok(secret.clone());
        }
        let mut bytes = [0; MeshSecret::BYTES];
        let drawn = getrandom(&mut bytes, GetRandomFlags::empty());
        let drawn = drawn.context("the system has no random numbers")?;
        ensure!(drawn == bytes.len(), "the system has too few random numbers");
        let (_, secret) = self.0.insert((generation, MeshSecret::new(bytes)));
        Ok(secret.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_of_a_generation_get_one_secret_and_other_generations_get_others() {
        let mut current = CurrentMeshSecret::default();
        let first = current.of(Generation(1)).unwrap();
        assert!(first.is_drawn());
        assert_eq!(current.of(Generation(1)).unwrap(), first);
        assert_ne!(current.of(Generation(2)).unwrap(), first);
        // Another coordinator, or this one after a restart.
        assert_ne!(CurrentMeshSecret::default().of(Generation(1)).unwrap(), first);
    }
}
