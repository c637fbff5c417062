//! The secret with which the ranks of one generation recognise each other.

use std::fmt;

use serde::{Deserialize, Serialize};

/// 32 random bytes that only the coordinator and the ranks of one generation know.
///
/// The engine draws no random numbers: it sends the default value, and the coordinator's loop puts the secret in its
/// place. With the default value no two ranks connect.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MeshSecret([u8; Self::BYTES]);

impl MeshSecret {
    /// Length in bytes.
    pub const BYTES: usize = 32;

    /// A secret of these bytes, which must be random.
    #[must_use]
    pub fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes, for a keyed hash.
    #[must_use]
    pub fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// Whether it was drawn: it is not the default value.
    #[must_use]
    pub fn is_drawn(&self) -> bool {
        *self != Self::default()
    }
}

/// Logs show messages in this form, so it must not show the secret.
impl fmt::Debug for MeshSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MeshSecret(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ids::Generation,
        message::{Directive, RankCommand},
    };

    #[test]
    fn a_message_that_is_logged_does_not_show_its_secret() {
        let (generation, secret) = (Generation(1), MeshSecret::new([0xab; MeshSecret::BYTES]));
        let directive = Directive::Begin { generation, peers: [].into(), secret: secret.clone() };
        let command = RankCommand::Begin { generation, peers: Vec::new(), secret };
        for text in [format!("{directive:?}"), format!("{directive:#?}"), format!("{command:?}")] {
            assert!(text.contains("MeshSecret(hidden)"), "{text}");
            assert!(!text.contains("171") && !text.to_lowercase().contains("abab"), "{text}");
        }
    }
}
