//! The frames between an agent and a rank: a little-endian u32 length, then as many bytes of JSON.

use std::io::{self, Read, Write};

use baton_job::{
    exit::Failure,
    message::{RankCommand, RankSays, Welcome},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Longest frame in bytes. The largest, a recipe, has a few kilobytes.
const MAX_FRAME: u32 = 1 << 20;

/// Agent → rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToRank {
    /// First frame of all.
    Setup(Setup),
    /// Second frame; a spare waits for it.
    Place(Place),
    /// From the agent's machine.
    Command(RankCommand),
}

/// What a rank must know before it can do anything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// What the coordinator said of the job.
    pub(crate) job: Welcome,
    /// Ranks that this node can run.
    pub(crate) local_ranks: u32,
    /// Folder of this node for copies of remote shards, if the recipe names none.
    pub(crate) cache_dir: std::path::PathBuf,
    /// Address on which other ranks reach this node.
    pub(crate) host: String,
}

/// Which of its node's ranks a process is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Its number on this node.
    pub(crate) local_rank: u32,
    /// The number of its CUDA device, if the agent knows that it has one.
    pub(crate) gpu: Option<u32>,
    /// Its log from here on, if it has written to another one so far.
    pub(crate) log: Option<std::path::PathBuf>,
}

/// Rank → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromRank {
    /// It has loaded all it needs and waits for a place in a generation.
    Warm,
    /// For the agent's machine.
    Says(RankSays),
    /// Why it is about to end.
    LastWords(Failure),
}

/// Writes one frame.
pub(crate) fn write(mut to: impl Write, value: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(value)?)
}

/// One frame as bytes.
pub(crate) fn frame(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(value)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= MAX_FRAME);
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

/// As [`read`], on tokio.
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
    if length > MAX_FRAME { Err(too_long(length as usize)) } else { Ok(length as usize) }
}

fn too_long(length: usize) -> io::Error {
    let text = format!("a frame of {length} bytes is over the limit of {MAX_FRAME}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use baton_job::{exit::Class, ids::Generation};

    use super::*;

    #[test]
    fn frames_come_back_in_order_until_the_end() {
        let begin = RankCommand::Begin { generation: Generation(3), peers: vec!["a:1".to_owned()] };
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
    fn absurd_length_is_refused_before_memory_is_taken() {
        let error = read::<FromRank>([0xff; 8].as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn torn_frame_is_an_error_not_an_end() {
        let failure = Failure { class: Class::Crash, message: "x".to_owned() };
        let bytes = frame(&FromRank::LastWords(failure)).unwrap();
        assert!(read::<FromRank>(&bytes[..bytes.len() - 1]).is_err());
    }
}
