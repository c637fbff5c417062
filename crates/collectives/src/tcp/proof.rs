//! How the two ends of a new connection prove that they know the generation's secret.
//!
//! Each side sends an opening: its hello and a nonce. The proof is a keyed hash (BLAKE3, the secret is the key) of which
//! side proves and of both openings. So only a process that knows the secret can make it, a recorded one is wrong on
//! every other connection, and neither side's proof can be sent back as the other's. The secret itself is never sent.
//!
//! This says who is at the other end when ranks connect. What they send afterwards is neither encrypted nor protected
//! from somebody who can change packets on the way.

use baton_job::MeshSecret;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::wire::RankHello;
use crate::Error;

/// Size of a nonce in bytes.
const NONCE_BYTES: usize = 32;
/// Size of a proof in bytes.
pub(super) const PROOF_BYTES: usize = blake3::OUT_LEN;

/// What a side sends first: its hello, then its nonce.
pub(super) type Opening = [u8; OPENING_BYTES];
/// Size of an opening in bytes.
pub(super) const OPENING_BYTES: usize = RankHello::SIZE + NONCE_BYTES;

/// An end of a connection.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum ConnectionEnd {
    /// It has called the other.
    Connecting = 1,
    /// It has a listener.
    Accepting = 2,
}

/// An opening with a new nonce.
pub(super) fn open(hello: RankHello) -> Result<Opening, Errno> {
    let mut opening = [0; OPENING_BYTES];
    opening[..RankHello::SIZE].copy_from_slice(&hello.encode());
    opening[RankHello::SIZE..].copy_from_slice(&random()?);
    Ok(opening)
}

/// The proof of `side`. Comparing two of them takes the same time wherever they differ.
pub(super) fn prove(
    secret: &MeshSecret,
    side: ConnectionEnd,
    connecting: &Opening,
    accepting: &Opening,
) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(secret.bytes());
    hasher.update(&[side as u8]).update(connecting).update(accepting);
    hasher.finalize()
}

/// A new random secret, for ranks that no coordinator brings together.
///
/// # Errors
/// The system has no random numbers.
pub fn draw_secret() -> Result<MeshSecret, Error> {
    let bytes = random().map_err(|errno| Error::io("getrandom")(errno.into()))?;
    Ok(MeshSecret::new(bytes))
}

/// 32 random bytes.
pub(super) fn random() -> Result<[u8; 32], Errno> {
    let mut bytes = [0; 32];
    // The kernel never returns fewer bytes for so few.
    match getrandom(&mut bytes, GetRandomFlags::empty())? {
        32 => Ok(bytes),
        _ => Err(Errno::IO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_depends_on_everything_that_it_covers() {
        let (secret, other) = (draw_secret().unwrap(), draw_secret().unwrap());
        let (a, b, c) = ([1; OPENING_BYTES], [2; OPENING_BYTES], [3; OPENING_BYTES]);
        let proof = prove(&secret, ConnectionEnd::Connecting, &a, &b);
        assert_eq!(proof, prove(&secret, ConnectionEnd::Connecting, &a, &b));
        for different in [
            prove(&other, ConnectionEnd::Connecting, &a, &b),
            prove(&secret, ConnectionEnd::Accepting, &a, &b),
            prove(&secret, ConnectionEnd::Connecting, &b, &a),
            prove(&secret, ConnectionEnd::Connecting, &c, &b),
            prove(&secret, ConnectionEnd::Connecting, &a, &c),
        ] {
            assert_ne!(proof, different);
        }
    }
}
