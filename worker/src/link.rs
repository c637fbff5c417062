//! Messages between an agent and a rank, as frames: a little-endian u32 length, then that many bytes of JSON.

use std::io::{self, Read, Write};

use baton_job::{
    NodeId,
    exit::Failure,
    message::{RankCommand, RankMessage, Welcome},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Longest frame, in bytes. The largest message, with the recipe, has a few kilobytes.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// Agent → rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToRank {
    /// First frame.
    Setup(Setup),
    /// Second frame; a spare waits for it.
    Slot(SlotAssignment),
    /// A command from the agent's session.
    Command(RankCommand),
}

/// What every rank process of a node needs before it has a slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// The job, as the coordinator describes it.
    pub(crate) job: Welcome,
    /// Number of ranks that this node can run.
    pub(crate) local_ranks: u32,
    /// Folder on this node for cached copies of remote shards, if the recipe names none.
    pub(crate) cache_dir: std::path::PathBuf,
    /// Name of this node.
    pub(crate) node: NodeId,
    /// Address on which ranks on other nodes reach this node.
    pub(crate) host: String,
}

/// The slot that a process fills.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SlotAssignment {
    /// Local rank.
    pub(crate) local_rank: u32,
    /// CUDA's number of its device, if the agent knows a device for it.
    pub(crate) gpu: Option<u32>,
    /// Log file to write to from now on; `None` to keep the present one.
    pub(crate) log: Option<std::path::PathBuf>,
}

/// Rank → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromRank {
    /// The process has loaded its libraries and the job, and waits to join a generation.
    Warm,
    /// A message for the agent's session.
    Message(RankMessage),
    /// The process will exit because of this failure.
    Failed(Failure),
}

/// Writes one frame.
pub(crate) fn write(mut to: impl Write, value: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(value)?)
}

/// One frame as bytes.
pub(crate) fn frame(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(value)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= MAX_FRAME_BYTES);
    let length = length.ok_or_else(|| too_long(body.len()))?;
    Ok([&length.to_le_bytes(), body.as_slice()].concat())
}

/// Reads one frame; `None` at the end of the stream between two frames.
pub(crate) fn read<T: DeserializeOwned>(mut from: impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let mut body = vec![0; checked(length)?];
    from.read_exact(&mut body)?;
    Ok(Some(serde_json::from_slice(&body)?))
}

/// Like [`read`], asynchronously.
pub(crate) async fn read_async<T: DeserializeOwned>(
    mut from: impl AsyncRead + Unpin,
) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    };
    let mut body = vec![0; checked(length)?];
    from.read_exact(&mut body).await?;
    Ok(Some(serde_json::from_slice(&body)?))
}

fn checked(length: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_le_bytes(length);
    if length > MAX_FRAME_BYTES { Err(too_long(length as usize)) } else { Ok(length as usize) }
}

fn too_long(length: usize) -> io::Error {
    let text = format!("a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES} bytes");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use baton_job::{MeshSecret, exit::Class, ids::Generation};

    use super::*;

    #[test]
    fn frames_are_read_in_order_until_the_end() {
        let (generation, peers) = (Generation(3), vec!["a:1".to_owned()]);
        let secret = MeshSecret::new([7; MeshSecret::BYTES]);
        let begin = RankCommand::Begin { generation, peers, secret };
        let drain = RankCommand::Drain { generation: Generation(3), reason: "ü".to_owned() };
        let sent = [ToRank::Command(begin), ToRank::Command(drain)];
        let mut bytes = Vec::new();
        for value in &sent {
            write(&mut bytes, value).unwrap();
        }
        let mut from = bytes.as_slice();
        assert_eq!(read::<ToRank>(&mut from).unwrap().as_ref(), Some(&sent[0]));
        assert_eq!(read::<ToRank>(&mut from).unwrap().as_ref(), Some(&sent[1]));
        assert_eq!(read::<ToRank>(&mut from).unwrap(), None);
    }

    #[test]
    fn excessive_length_is_refused_before_memory_is_allocated() {
        let error = read::<FromRank>([0xff; 8].as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn truncated_frame_is_an_error() {
        let failure = Failure { class: Class::Crash, message: "x".to_owned() };
        let bytes = frame(&FromRank::Failed(failure)).unwrap();
        assert!(read::<FromRank>(&bytes[..bytes.len() - 1]).is_err());
    }
}
