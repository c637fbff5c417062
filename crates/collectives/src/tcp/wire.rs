//! The format of the bytes on a connection. All numbers are little-endian.
//!
//! A connection begins with a [`RankHello`] in each direction and the rest of the handshake (`proof`). Messages follow: a [`MessageHeader`] and as many bytes
//! as it states. Values are f32 as they are in memory.

use std::fmt;

use baton_job::{Generation, Rank};

use crate::Membership;

#[cfg(target_endian = "big")]
compile_error!("values are sent in memory order, which must be little-endian");

/// Version of the protocol, incremented when messages change; ranks with a different version are refused.
pub(super) const PROTOCOL: u32 = 4;

const MAGIC: [u8; 4] = *b"BATN";

/// Identity of the sender, and the rank it expects to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankHello {
    pub(super) from: Membership,
    pub(super) to: Rank,
}

impl RankHello {
    /// Size in bytes; the same in all versions of the protocol.
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

    /// `None` if the bytes are from another program.
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

/// The operation of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum MessageKind {
    /// The argument is the number of virtual ranks.
    AllReduce = 1,
    /// The argument is the root.
    Broadcast = 2,
    /// The argument is 0.
    AllGatherBytes = 3,
    /// Offers of shared memory, or the answers. The argument is 0.
    ShareMemory = 4,
}

/// Precedes every message. Both sides know which message comes next, so any difference means that they do different
/// things.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct MessageHeader {
    /// Number of exchanges before this message, since the handshake.
    pub(super) sequence: u64,
    /// A [`MessageKind`].
    kind: u32,
    /// Meaning depends on the kind.
    argument: u32,
    /// Number of bytes that follow.
    pub(super) length: u64,
}

impl MessageHeader {
    /// Size in bytes.
    pub(super) const SIZE: usize = 24;

    pub(super) fn new(sequence: u64, kind: MessageKind, argument: u32, length: usize) -> Self {
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

impl fmt::Display for MessageHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, kind, argument, length } = self;
        match kind {
            1 => write!(f, "all_reduce over {argument} virtual ranks")?,
            2 => write!(f, "broadcast from rank {argument}")?,
            3 => write!(f, "all_gather_bytes")?,
            4 => write!(f, "share_memory")?,
            _ => write!(f, "unknown operation {kind}")?,
        }
        write!(f, " with {length} bytes as message {sequence}")
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_decoded_and_garbage_is_not() {
        let from = Membership {
            protocol: PROTOCOL,
            generation: Generation(u64::MAX - 1),
            rank: Rank(3),
            world_size: 8,
        };
        let hello = RankHello { from, to: Rank(2) };
        assert_eq!(RankHello::decode(&hello.encode()), Some(hello));
        assert_eq!(RankHello::decode(b"GET / HTTP/1.1\r\nHost: rank00"), None);
    }

    #[test]
    fn a_header_is_decoded_and_can_be_displayed() {
        let header = MessageHeader::new(7, MessageKind::AllReduce, 8, 400);
        assert!(MessageHeader::decode(&header.encode()) == header);
        assert_eq!(
            header.to_string(),
            "all_reduce over 8 virtual ranks with 400 bytes as message 7"
        );
    }
}
