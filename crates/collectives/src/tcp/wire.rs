//! What the bytes on a connection mean. All numbers are little-endian.
//!
//! A connection begins with one [`Hello`] each way; then come messages, a [`Header`] and as many
//! bytes as it says. Values are f32 as they lie in memory.

use std::fmt;

use baton_job::{Generation, Rank};

use crate::Membership;

#[cfg(target_endian = "big")]
compile_error!("values are sent as they lie in memory, which must be little-endian");

/// Grows when messages change; ranks that speak another one are refused.
pub(super) const PROTOCOL: u32 = 1;

const MAGIC: [u8; 4] = *b"BATN";

/// Who is there, and whom he wants to talk to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) from: Membership,
    pub(super) to: Rank,
}

impl Hello {
    /// Bytes on the wire; the same in all versions of the protocol.
    pub(super) const SIZE: usize = 28;

    pub(super) fn encode(&self) -> [u8; Self::SIZE] {
        let Membership { protocol, generation, rank, world_size } = self.from;
        let mut bytes = [0; Self::SIZE];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&protocol.to_le_bytes());
        bytes[8..16].copy_from_slice(&generation.0.to_le_bytes());
        bytes[16..20].copy_from_slice(&rank.0.to_le_bytes());
        bytes[20..24].copy_from_slice(&world_size.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.to.0.to_le_bytes());
        bytes
    }

    /// `None` if these are some other program's bytes.
    pub(super) fn decode(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        if bytes[0..4] != MAGIC {
            return None;
        }
        let from = Membership {
            protocol: u32_at(bytes, 4),
            generation: Generation(u64_at(bytes, 8)),
            rank: Rank(u32_at(bytes, 16)),
            world_size: u32_at(bytes, 20),
        };
        Some(Self { from, to: Rank(u32_at(bytes, 24)) })
    }
}

/// What a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    /// The argument is the number of virtual ranks.
    AllReduce = 1,
    /// The argument is the root.
    Broadcast = 2,
    /// The argument is 0.
    AllGatherBytes = 3,
}

/// What comes before a message. Both sides know what must come next, so any difference means that
/// they are not doing the same thing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Counts the exchanges of messages since the handshake.
    pub(super) sequence: u64,
    /// A [`Kind`].
    kind: u32,
    /// What the kind says.
    argument: u32,
    /// Bytes that follow.
    pub(super) length: u64,
}

impl Header {
    /// Bytes on the wire.
    pub(super) const SIZE: usize = 24;

    pub(super) fn new(sequence: u64, kind: Kind, argument: u32, length: usize) -> Self {
        Self { sequence, kind: kind as u32, argument, length: length as u64 }
    }

    pub(super) fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[0..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.kind.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.argument.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::SIZE]) -> Self {
        Self {
            sequence: u64_at(bytes, 0),
            kind: u32_at(bytes, 8),
            argument: u32_at(bytes, 12),
            length: u64_at(bytes, 16),
        }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, kind, argument, length } = self;
        match kind {
            1 => write!(f, "all_reduce over {argument} virtual ranks")?,
            2 => write!(f, "broadcast from rank {argument}")?,
            3 => write!(f, "all_gather_bytes")?,
            _ => write!(f, "unknown operation {kind}")?,
        }
        write!(f, " with {length} bytes as message {sequence}")
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_survives_the_wire_and_garbage_does_not() {
        let from = Membership {
            protocol: PROTOCOL,
            generation: Generation(u64::MAX - 1),
            rank: Rank(3),
            world_size: 8,
        };
        let hello = Hello { from, to: Rank(2) };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        assert_eq!(Hello::decode(b"GET / HTTP/1.1\r\nHost: rank00"), None);
    }

    #[test]
    fn a_header_survives_the_wire_and_tells_itself_in_words() {
        let header = Header::new(7, Kind::AllReduce, 8, 400);
        assert!(Header::decode(&header.encode()) == header);
        assert_eq!(
            header.to_string(),
            "all_reduce over 8 virtual ranks with 400 bytes as message 7"
        );
    }
}
